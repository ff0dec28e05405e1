"""Codes of the Hopper backend (M52x) and of distributed runs (M7xx): a title line, then the text of `maskc explain`."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M520": """The Hopper backend was asked for tensors that are not on a GPU.
`backend="hopper"` needs q, k and v, and the vectors of the mask, on one CUDA device. `backend="auto"` follows the tensors.""",
    "M521": """The GPU is not a Hopper one.
The generated kernels use instructions of sm_90a (H100, H200) that no other GPU has. `backend="flex"` runs the same mask on any
CUDA GPU, and `backend="auto"` takes it there.""",
    "M522": """The kernels have no such dtype.
q, k and v are all torch.bfloat16 or all torch.float16; a result may have their dtype or float32.""",
    "M523": """The kernels have no such head dim.
Head dims are 64, 128 and 256, the same for keys and values. Others can be padded with zeros to the next one: scores and
the first columns of the output stay what they were, if the scale is kept at that of the unpadded size.""",
    "M524": """The blocks of a block table are not multiples of the kernel's tile.
A tile lies in one block of the table, so both block sizes are multiples of the tile: 128 rows, and 128 keys (64 at head
dim 256).""",
    "M525": """The scale is not a positive, finite number.
The running maximum of the online softmax is kept over unscaled scores, which is only right for a positive scale. Fold a
sign into q.""",
    "M526": """The schedule belongs to other vectors.
What `hopper.schedule` returned serves the vectors and the head dim it was made for. Pass none, and it is made anew.""",
    "M528": """FlexAttention cannot run a head dim.
On a GPU its kernels need head dims of 16 or more. Pad q, k and v with zeros and keep the scale.""",
    "M529": """FlexAttention has no backward on a CPU.
`backend="flex"` runs forward on CPU tensors, for comparisons; `backend="cpu"` is differentiable.""",
    "W520": """A GPU that is no Hopper runs masks through FlexAttention.
The generated kernels need sm_90a (H100, H200). On any other CUDA GPU `backend="auto"` takes torch's FlexAttention with the
same mask: the same results, at FlexAttention's speed. It is said once a process; `backend="flex"` asks for it by name.""",
    "M701": """The number of ranks is missing or wrong.
`maskc.plan` needs `world_size` (at least 1) or a process group; when both are given they must agree.""",
    "M702": """The chunks of a plan are not well formed.
Chunks have at least one row, their edges rise from 0 to the length, and each has one owner among the ranks. A list given
as `assign` names one rank per chunk.""",
    "M703": """There is no such rank.
Ranks of a plan count from 0 to world_size - 1.""",
    "M704": """The chunks of a rank are not in ascending order.
Local row numbers must rise with the rows of the sequence: over unsorted rows, the rows that a key masks would not form an
interval and no vector could describe them.""",
    "M705": """The sizes of the mask and of the plan differ.
All masks of one plan have the same number of rows and keys, and run with a plan of exactly that size.""",
    "M706": """The plan was made for another mask or for other data.
A plan keeps a digest of the vectors of every mask it was made for. Document lengths and other inputs change with each
batch: make a plan for each, from the same bound mask that runs. It costs milliseconds and can be made one step ahead in a
data-loader worker.""",
    "M707": """The plan is for another number of ranks than the group has.
A plan cannot be used with a larger or smaller group: rows would be missing or counted twice.""",
    "M708": """The ranks are not about to do the same thing.
At the first use of a plan in a group the ranks compare sizes, mask, data, plan, strategy, dtypes and version. One of them
differs, or one rank refused the call; the message names it. Every rank raises, nothing was computed.""",
    "M709": """Communication with another rank failed.
A peer died, stalled for longer than the timeout of the process group, or made a different call. Every surviving rank gets
this error within that timeout. The group cannot be used again: destroy it and make a new one. The timeout is the one given
to `torch.distributed.init_process_group` or `new_group`. Over NCCL, set TORCH_NCCL_BLOCKING_WAIT=1 to get this error where a
peer is lost in the middle of a step; by default torch's watchdog ends the process then, a minute after the timeout (four times
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC).""",
    "M710": """A tensor does not have the shape that the plan says.
Under a plan a rank holds exactly its rows: cut tensors of the whole sequence with `plan.shard(x, rank)`. Without a plan,
every rank holds ceil(n / ranks) rows in order, the last one fewer.""",
    "M711": """The length of the sequence is not known.
The mask was bound without sizes and no input has one per row or key. Give `nq=` and `nk=` to `bind` or to `maskc.plan`.""",
    "M712": """It is not clear what the documents are.
`positions(per="doc")`, `shift_labels`, `roll(per="doc")` and order "zigzag-document" go by the one segments input of the
mask that is not within another. With several, or none, name it: `maskc.plan(..., documents="doc")`.""",
    "M713": """Unknown name of an order, strategy or axis.
Orders: contiguous, zigzag, zigzag-document, balanced. Strategies: all-gather, staged, ring, gated, copy-then-attend,
sm-copy, auto. Axes: rows, keys. Directions: forward, backward. Positions count per doc or per sequence.""",
    "M714": """The plan has too many chunks.
Workloads and transfers are kept per pair of chunks, so their number is limited. Choose a larger `chunk`.""",
    "M715": """A plan lacks something it was asked for.
It needs at least one mask; `weights` gives for each the number of layers that use it, at least 1; and bytes can only be
told when the plan was made with `heads_kv` and `head_dim`.""",
    "M716": """The ranks do not divide into nodes.
`nodes` is the number of machines, each with the same number of ranks, numbered machine by machine.""",
    "M717": """An argument of maskc.plan is not what it must be.
Masks are bound masks, sizes are whole numbers, `epsilon` is a share >= 0 and goes with order balanced,
and switches are True or False.""",
    "M721": """A key chunk did not arrive.
Overlapped attention waits for the keys of other ranks while it runs, each wait for a bounded time. A peer died, is late, or
made another call (by mask, plan, shapes or direction: the message gives its number), or waiting was stopped. Results since the
last `finish` are useless; the rank can be used again.""",
    "M722": """Overlapped attention cannot run this call.
It copies every chunk straight from its owner, so a plan across nodes is made with `hierarchical=False`; it tells 4096 key
chunks of a rank apart; and the time that a wait may take lies between 0 and 4398 seconds. A CUDA graph cannot hold such a call:
its replays would all wait for the flags of one. Its kernels are maskc's own, so backend "flex" has none.""",
    "M723": """Ranks cannot reach each other's memory.
The strategies "gated", "copy-then-attend" and "sm-copy" write keys into the memory of other ranks: GPUs of one host that
torch's symmetric memory connects, or processes of one host for tensors on the CPU. The message says what is missing.
`strategy="auto"` takes another way then, and says so once in the log ("maskc", level INFO).""",
}

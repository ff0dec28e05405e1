"""KernelSpec: every number that the forward template and its schedule kernels may use, in one frozen, printed value.

`MaskForm` and `WgmmaShape` are shared with the backward kernel. Head counts, GQA ratios, per-head masks, lengths and
strides are run-time numbers of one compiled kernel, not variants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

Dtype = Literal["bf16", "f16"]
OutDtype = Literal["input", "f32"]
Scheduler = Literal["static", "dynamic", "lpt", "giants"]
QueueSource = Literal["generator", "schedule"]

SHARED_LIMIT = 232_448  # bytes of dynamic shared memory one CTA may have on sm_90
VECTORS = ("lts", "lte", "uts", "ute", "diag")
HEAD_DIMS = (64, 128, 256)
GATE_SLOTS = 4096
"""Pieces of keys (chunks times groups of heads) that a gated kernel tells apart."""

# Tags of a queued KV block: which tests its elements need. 0 is UNMASKED; the queue never holds a SKIP block.
TAIL, CAUSAL, LTS, LTE, UTS, UTE, DIAG, UNSEEN = (1 << i for i in range(8))
HIDDEN = UNSEEN  # from the rows of one warp group: the bit never comes alone otherwise
SKIP = 1 << 31
# What a role is doing, as a trace variant records it; a mark of one state ends the state before.
STATES = ("queue", "slot", "index", "issue", "tile", "turn", "scores", "softmax", "output", "epilogue", "end")
TAGS = {
    "tail": TAIL,
    "causal": CAUSAL,
    "lts": LTS,
    "lte": LTE,
    "uts": UTS,
    "ute": UTE,
    "diag": DIAG,
    "unseen": UNSEEN,
    "hidden": HIDDEN,
    "skip": SKIP,
}


@dataclass(frozen=True, slots=True)
class MaskForm:
    """Which parts a mask has: boundary vectors, the free causal triangle, a block table."""

    lts: bool = False
    lte: bool = False
    uts: bool = False
    ute: bool = False
    diag: bool = False
    causal: bool = False
    blocks: bool = False

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that exist, in the order in which they are stored."""
        return tuple(name for name in VECTORS if getattr(self, name))

    @property
    def ranges(self) -> int:
        """Masked row ranges that one key may have."""
        return self.causal + self.diag + self.lts + self.ute

    @property
    def closed(self) -> Literal["full", "causal"] | None:
        """The closed form: a mask without data, whose queue is arithmetic."""
        if self.vectors or self.blocks:
            return None
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        parts = [*(["causal"] if self.causal else []), *self.vectors, *(["blocks"] if self.blocks else [])]
        return "+".join(parts) or "full"


@dataclass(frozen=True, slots=True)
class WgmmaShape:
    """One wgmma m64nNk16 wrapper that a kernel uses. K-major operands have k contiguous; MN-major ones are transposed."""

    n: int
    a_in_registers: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False

    @property
    def accumulators(self) -> int:
        """fp32 accumulator registers of a thread."""
        return self.n // 2

    @property
    def name(self) -> str:
        """wgmma_<r|s><s>_n<N>_<k|m><k|m>: A in registers or shared memory, then the majors of A and B."""
        majors = ("m" if self.a_mn_major else "k") + ("m" if self.b_mn_major else "k")
        return f"wgmma_{'r' if self.a_in_registers else 's'}s_n{self.n}_{majors}"


@dataclass(frozen=True, slots=True)
class Region:
    """A part of shared memory: byte offset and size; `slots` equal parts of `stride` bytes."""

    name: str
    offset: int
    stride: int
    slots: int

    @property
    def size(self) -> int:
        return self.stride * self.slots


def lay_out(parts: list[tuple[str, int, int, int]]) -> tuple[Region, ...]:
    """Regions one after the other from (name, bytes of a slot, slots, alignment)."""
    out, offset = [], 0
    for name, size, slots, align in parts:
        stride = -(-size // align) * align
        offset = -(-offset // align) * align
        out.append(Region(name, offset, stride, slots))
        offset += stride * slots
    return tuple(out)


@dataclass(frozen=True)
class KernelSpec:
    """A forward kernel.

    block_q, block_kv: tile sizes in rows and keys; each of `warp_groups` consumer warp groups owns 64 rows.
    *_slots: depths of the shared-memory rings. queue_runs: runs of KV blocks that one queue slot holds.
    scheduler: static = item i goes to CTA i mod grid; dynamic = next free CTA; lpt = dynamic, longest rows first inside
    a group of heads; giants = lpt, with the longest rows of all heads, group by group, before everything else.
    queue: who classifies KV blocks, the generator warp or the schedule kernel (whose overflowing rows the generator
    takes back). headroom_log2: a row's reference starts this many powers of two above its maximum, and O is rescaled when
    scores outgrow it.
    zero_unseen: V rows of keys that no row sees are zeroed in shared memory. record_queue: a debug variant.
    trace: events that each role of a CTA records, 0 for none. gated: the loader waits for the chunk that keys lie in, and
    work items come in the order of a table. row_groups: parts of a Q block with tags of their own: 1, or one a warp group,
    which then passes over the blocks that its 64 rows do not see. chain: the first tile of a work item runs beside the last
    P V of the one before.
    """

    head_dim: int
    dtype: Dtype = "bf16"
    out_dtype: OutDtype = "input"
    form: MaskForm = MaskForm()
    block_q: int = 128
    block_kv: int = 128
    warp_groups: int = 2
    row_groups: int = 1
    q_slots: int = 2
    k_slots: int = 2
    v_slots: int = 2
    queue_slots: int = 2
    queue_runs: int = 60
    scheduler: Scheduler = "giants"
    queue: QueueSource = "generator"
    ping_pong: bool = True
    chain: bool = False
    headroom_log2: int = 8
    zero_unseen: bool = True
    record_queue: bool = False
    trace: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        rules = (
            (self.head_dim in HEAD_DIMS, f"head_dim is one of {HEAD_DIMS}"),
            (self.block_q == 64 * self.warp_groups, "block_q is 64 rows a warp group"),
            (1 <= self.warp_groups <= 3, "1 to 3 warp groups"),
            (self.row_groups in (1, self.warp_groups), "row groups are warp groups, or one of all"),
            (self.row_groups == 1 or not self.chain, "chained items have one row group"),
            (self.block_kv % 16 == 0 and 16 <= self.block_kv <= 256, "block_kv is a multiple of 16 up to 256"),
            (33 <= self.queue_runs < 256, "a queue slot holds the runs of one step of the generator"),
            (self.q_slots > 1 or not self.chain, "chained items have a Q slot each"),
            (self.form.closed is None or self.queue == "generator", "a closed form has no schedule"),
            (self._registers_fit, "producer and consumer registers fit what the CTA has at entry"),
            (self.shared_bytes <= SHARED_LIMIT, f"{self.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT}"),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise ValueError(f"{self}: " + "; ".join(broken))

    # ---- names and text

    @property
    def direction(self) -> str:
        return "fwd"

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return "attn_fwd"

    def __str__(self) -> str:
        gated = "-gated" if self.gated else ""
        return f"fwd-d{self.head_dim}-{self.dtype}-{self.form}-{self.block_q}x{self.block_kv}{gated}"

    def text(self) -> str:
        """The form that `--emit spec` prints: one `name = value` a line, then what follows from them."""
        lines = [f"{f.name} = {getattr(self, f.name)}" for f in fields(self)]
        lines += [
            f"threads = {self.threads}",
            f"registers = {self.producer_registers} producer, {self.consumer_registers} consumer",
        ]
        lines += [f"shared.{r.name} = {r.offset} + {r.slots} x {r.stride}" for r in self.regions]
        return "\n".join(["direction = fwd", *lines, f"shared = {self.shared_bytes}"]) + "\n"

    def as_json(self) -> dict[str, object]:
        """Plain data for manifests."""
        plain: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "form"}
        return {"direction": "fwd", "form": str(self.form), **plain, "threads": self.threads, "shared": self.shared_bytes}

    # ---- what follows

    @property
    def threads(self) -> int:
        """One producer warp group, then the consumers."""
        return 128 * (1 + self.warp_groups)

    @property
    def tag_bits(self) -> int:
        """Low bits of a run word: a tag for each row group, from the lowest rows; above them the number of blocks."""
        return 8 * self.row_groups

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warp_groups

    @property
    def producer_registers(self) -> int:
        return {1: 56, 2: 40 if self._busy_producers else 24, 3: 32}[self.warp_groups]

    @property
    def consumer_registers(self) -> int:
        return {1: 256, 2: 232 if self._busy_producers else 240, 3: 160}[self.warp_groups]

    @property
    def _busy_producers(self) -> bool:
        """Whether producers could spill with the fewest registers; at head dim 256 the consumers have none to give."""
        return (self.packed or self.gated) and self.head_dim < 256

    @property
    def _registers_fit(self) -> bool:
        """A setmaxnreg.inc beyond the registers that the CTA was launched with waits for ever."""
        at_entry = 65536 // self.threads // 8 * 8
        return self.producer_registers + self.warp_groups * self.consumer_registers <= at_entry * (1 + self.warp_groups)

    @property
    def qk(self) -> WgmmaShape:
        """S = Q K^T: Q and K K-major in shared memory."""
        return WgmmaShape(self.block_kv)

    @property
    def pv(self) -> WgmmaShape:
        """O += P V: P in registers, V MN-major."""
        return WgmmaShape(self.head_dim, a_in_registers=True, b_mn_major=True)

    @property
    def wgmma(self) -> tuple[WgmmaShape, ...]:
        return (self.qk, self.pv)

    @property
    def packed(self) -> bool:
        """Whether KV blocks come with a pack: their bounds, then the bitmap of unseen keys."""
        return self.form.closed is None

    @property
    def late(self) -> bool:
        """Whether a work item is taken when the loader is near the end of the one before.

        A gated kernel does so by its gate. For a mask without data, whose items are long and alike, it is worth nothing.
        """
        return self.packed and not self.gated

    @property
    def first_at_once(self) -> bool:
        """Whether a CTA's first work item is queued in two parts, the first as soon as it is found.

        The two take all queue slots: under a causal mask with data, whose items are short, the next item would come late.
        """
        return self.late and not self.form.causal

    @property
    def gate_slots(self) -> int:
        """Key chunks of a call at most."""
        return GATE_SLOTS

    @property
    def bitmap_bytes(self) -> int:
        return -(-self.block_kv // 128) * 16

    @property
    def pack_bytes(self) -> int:
        """Bytes of one KV block's pack: block_kv int32 of each vector, then a bit per key, rounded to 16 bytes."""
        return len(self.form.vectors) * self.block_kv * 4 + self.bitmap_bytes

    @property
    def barriers(self) -> int:
        """mbarriers: full and empty of each slot, and one for O in a Q slot."""
        rings = self.q_slots + self.k_slots + self.v_slots + self.queue_slots
        return 2 * rings + (self.q_slots if self.out_dtype == "input" else 0)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Shared memory. Tiles come first: they are aligned to the swizzle pattern's 1024 bytes."""
        row = self.head_dim * 2
        parts = [
            ("q", self.block_q * row, self.q_slots, 1024),
            ("k", self.block_kv * row, self.k_slots, 1024),
            ("v", self.block_kv * row, self.v_slots, 1024),
            ("pack", self.pack_bytes if self.packed else 0, self.k_slots, 128),
            ("queue", 32 + 8 * self.queue_runs, self.queue_slots, 16),
            ("barriers", 8, self.barriers, 8),
        ]
        if self.gated:
            parts.append(("gate", 16 + self.gate_slots // 8, 1, 16))
        elif self.late:
            parts.append(("progress", 4, 1, 4))
        return lay_out(parts)

    @property
    def smem(self) -> dict[str, Region]:
        return {r.name: r for r in self.regions}

    @property
    def shared_bytes(self) -> int:
        last = self.regions[-1]
        return last.offset + last.size

"""BackwardSpec: every number that the backward template may use.

One spec renders one source with three kernels: attn_bwd_pre (row constants, key tile records and their order, zeroed
accumulators), attn_bwd, attn_bwd_post (dQ out of its accumulators).

Head counts, GQA ratios, lengths, strides and the dtype of the results are run-time numbers, not variants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Literal

from maskc.codegen.render import CudaSource, render
from maskc.codegen.roles import Barrier, Role
from maskc.codegen.spec import HEAD_DIMS, SHARED_LIMIT, Dtype, MaskForm, Region, WgmmaShape, lay_out

LOADER, REDUCER, CLEANER, CONSUMER = "KV Loader", "dQ Reducer", "Row Cleaner", "MMA Consumer"
ZEROER, WATCHER = "dQ Zeroer", "Sum Watcher"

_FULL = MaskForm()
_HOLDS = {
    "k": "K tiles, then dK on its way out",
    "v": "V tile",
    "q": "Q tiles",
    "dout": "dO tiles",
    "ds": "dS as [keys][rows]",
    "p": "P as [keys][rows]",
    "dq": "dQ parts of the two warp groups, fp32; dV on its way out",
    "lse": "lse2 of the rows",
    "dpsum": "dpsum of the rows",
    "items": "work items as they are dealt, with their key tiles' records",
    "barriers": "mbarriers",
}


@dataclass(frozen=True)
class BackwardSpec:
    """A backward kernel: two consumer warp groups and one producer warp group.

    block_q, block_kv: rows of a Q block and keys of a tile. slots: ring depth of Q and dO. k_slots: 2 where the next
    tile's K is loaded while this one is in use. v_steps: 16-column steps of dP^T whose part of V stays in registers (S
    and dP read shared memory as fast as it can be read); v_more: further ones in UNMASKED blocks, where no mask needs
    the registers. Where a tile has 128 keys, each warp group owns 64 of them (dK, dV from P and dS in registers). A tile
    of 64 keys is shared ("wide"): each group scores half of the rows, P and dS pass through shared memory, and each
    group owns half of the columns of dK, dV and dQ; dQ then goes from registers to global memory, for the staging tile
    does not fit.
    deterministic: dQ is added in ascending order of key tiles. (dK and dV are always summed in one order.)
    gated: a tile waits for the chunk that its keys lie in, the last tile of a chunk reports its gradients, and items come
    in the order of a table (`maskc.runtime.overlap`).
    """

    head_dim: int
    dtype: Dtype = "bf16"
    form: MaskForm = _FULL
    deterministic: bool = False
    block_q: int = 64
    block_kv: int = 128
    slots: int = 2
    k_slots: int = 1
    v_steps: int = 0
    v_more: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        rules = (
            (self.head_dim in HEAD_DIMS, f"head_dim is one of {HEAD_DIMS}"),
            (self.block_q in (64, 128), "block_q is 64 or 128"),
            (self.block_kv in (64, 128), "block_kv is 64 or 128"),
            (not self.wide or self.block_q == 64, "64 keys go with 64 rows"),
            (not self.wide or self.k_slots == 1, "64 keys go with one slot of K: its return says that dV has left V"),
            (self.v_steps > 0 or self.v_more == 0, "v_more comes on top of v_steps"),
            (self.slots >= 2, "with one dS buffer a warp group overwrites what the other still reads"),
            (self.shared_bytes <= SHARED_LIMIT, f"{self.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT}"),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise ValueError(f"{self}: " + "; ".join(broken))

    # ---- names and text

    @property
    def direction(self) -> str:
        return "bwd"

    @property
    def name(self) -> str:
        """The main kernel's function name."""
        return "attn_bwd"

    def __str__(self) -> str:
        marks = ("-det" if self.deterministic else "") + ("-gated" if self.gated else "")
        return f"bwd-d{self.head_dim}-{self.dtype}-{self.form}-{self.block_q}x{self.block_kv}{marks}"

    def text(self) -> str:
        """The form that `--emit spec` prints: one `name = value` a line, then what follows from them."""
        lines = [f"{f.name} = {getattr(self, f.name)}" for f in fields(self)]
        lines += [
            f"threads = {self.threads}",
            f"registers = {self.producer_registers} producer, {self.consumer_registers} consumer",
        ]
        lines += [f"shared.{r.name} = {r.offset} + {r.slots} x {r.stride}" for r in self.regions]
        return "\n".join(["direction = bwd", *lines, f"shared = {self.shared_bytes}"]) + "\n"

    def as_json(self) -> dict[str, object]:
        """Plain data for manifests."""
        plain: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "form"}
        return {"direction": "bwd", "form": str(self.form), **plain, "threads": self.threads, "shared": self.shared_bytes}

    # ---- geometry

    threads = 384
    producer_registers = 24
    consumer_registers = 240

    @property
    def halves(self) -> bool:
        """Whether a warp group rests in blocks that are hidden from all its keys. Pays where a tile has few blocks."""
        return not self.wide and bool(self.form.vectors)

    @property
    def tile_ints(self) -> int:
        """Numbers of a key tile's record, see templates/bwd/key_tile.cuh.j2."""
        return 32 if self.halves else 16

    @property
    def item_bytes(self) -> int:
        """Of a work item and its record in shared memory."""
        return 48 + 4 * self.tile_ints

    @property
    def wide(self) -> bool:
        """The warp groups share the tile's keys and split columns."""
        return self.block_kv == 64

    @property
    def score_cols(self) -> int:
        """Rows of a Q block that one warp group scores (columns of S^T)."""
        return self.block_q // 2 if self.wide else self.block_q

    @property
    def grad_cols(self) -> int:
        """Columns of dK and dV that one warp group accumulates."""
        return self.head_dim // 2 if self.wide else self.head_dim

    @property
    def dq_split(self) -> Literal["rows", "cols"]:
        """How the warp groups share a dQ tile."""
        return "rows" if self.block_q == 128 else "cols"

    @property
    def dq_cols(self) -> int:
        """Columns of dQ that one warp group computes, for 64 rows."""
        return self.head_dim if self.dq_split == "rows" else self.head_dim // 2

    @property
    def dq_reducer(self) -> bool:
        """Whether dQ passes through shared memory to a reducer warp (else straight from registers)."""
        return not self.wide

    @property
    def dp_from_dpsum(self) -> bool:
        """Whether dP of an UNMASKED block is summed onto dpsum. At head dim 64 there are no registers for that."""
        return self.head_dim == 128

    @property
    def zeroes_ahead(self) -> bool:
        """Whether an idle warp can zero dQ accumulators that later items add to (in few registers, hence not everywhere)."""
        return self.dq_reducer and not self.deterministic and not self.gated

    @property
    def score_mma(self) -> WgmmaShape:
        """S^T = K Q^T and dP^T = V dO^T: all K-major in shared memory."""
        return WgmmaShape(self.score_cols)

    @property
    def dp_mma(self) -> WgmmaShape:
        """dP^T = V dO^T where V lies in registers."""
        return WgmmaShape(self.score_cols, a_in_registers=True)

    @property
    def grad_mma(self) -> WgmmaShape:
        """Products dV += P dO and dK += dS Q: P and dS in registers (shared memory where wide), dO and Q MN-major."""
        return WgmmaShape(self.grad_cols, a_in_registers=not self.wide, b_mn_major=True)

    @property
    def dq_mma(self) -> WgmmaShape:
        """Product dQ = dS^T K: dS lies as [keys][rows], so both operands are MN-major."""
        return WgmmaShape(self.dq_cols, a_mn_major=True, b_mn_major=True)

    @property
    def wgmma(self) -> tuple[WgmmaShape, ...]:
        return tuple(dict.fromkeys((self.score_mma, *([self.dp_mma] if self.v_steps else []), self.grad_mma, self.dq_mma)))

    # ---- mask form: an upper interval without UTS starts at row 0 and joins causal and diag in one lower limit per key

    @property
    def whole_keys(self) -> bool:
        """Keys are hidden from all rows or from none: only those past the end are hidden."""
        return not self.form.causal and not self.form.vectors

    @property
    def has_low(self) -> bool:
        """Keys have a lower limit of rows; without it, a lower interval hides keys past the end."""
        return self.form.causal or self.form.diag or self.ute_is_low or not self.has_lower

    @property
    def has_lower(self) -> bool:
        return self.form.lts

    @property
    def has_lte(self) -> bool:
        return self.form.lts and self.form.lte

    @property
    def has_upper(self) -> bool:
        return self.form.ute and self.form.uts

    @property
    def ute_is_low(self) -> bool:
        return self.form.ute and not self.form.uts

    # ---- shared memory, roles, barriers

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Shared memory. Tiles come first: they are aligned to the swizzle pattern's 1024 bytes."""
        row = self.head_dim * 2
        parts = [
            ("k", self.block_kv * row, self.k_slots, 1024),
            ("v", self.block_kv * row, 1, 1024),
            ("q", self.block_q * row, self.slots, 1024),
            ("dout", self.block_q * row, self.slots, 1024),
            ("ds", self.block_q * self.block_kv * 2, self.slots, 1024),
            *([("p", self.block_q * self.block_kv * 2, self.slots, 1024)] if self.wide else []),
            *([("dq", 64 * self.dq_cols * 4, 2, 1024)] if self.dq_reducer else []),
            ("lse", self.block_q * 4, self.slots, 128),
            ("dpsum", self.block_q * 4, self.slots, 128),
            ("items", self.item_bytes, 2, 16),
            ("barriers", 8, sum(b.slots for b in self.barriers), 8),
        ]
        return lay_out(parts)

    @property
    def holds(self) -> dict[str, str]:
        """What each region holds, for the comments."""
        return _HOLDS

    @property
    def shared_bytes(self) -> int:
        last = self.regions[-1]
        return last.offset + last.size

    @property
    def roles(self) -> tuple[Role, ...]:
        adds = "adds dQ tiles to global memory in bulk, " if self.dq_reducer else ""
        if self.deterministic:
            adds = "adds dQ tiles in ascending order of key tiles, " if self.dq_reducer else "grants the turns to add dQ, "
        clean = "waits for the item's keys, " if self.gated else ""
        fourth = "idle", "only gives up its registers"
        if self.zeroes_ahead:
            fourth = ZEROER, "zeroes dQ of heads that come later"
        elif self.gated:
            fourth = WATCHER, "looks whether what other ranks have of an item's dK and dV is there"
        return (
            Role("0", LOADER, "deals work items; one lane issues every load: K and V, then Q, lse2, dO, dpsum of each Q block"),
            Role("1", REDUCER, adds + "stores dK and dV"),
            Role("2", CLEANER, clean + "zeroes rows of Q and dO that see nothing, in blocks that have such rows"),
            Role("3", *fourth),
            Role("4-11", CONSUMER, "two warp groups; all products, and the mask"),
        )

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """mbarriers, in the order in which they lie in shared memory."""
        n, each = self.slots, "each consumer warp"
        rows = (
            ("item_full", 2, 1, LOADER, "all other roles", "a work item and its record"),
            (
                "item_empty",
                2,
                10 + (self.zeroes_ahead or self.gated),
                "each warp of the other roles",
                LOADER,
                "nobody looks at it any more",
            ),
            ("k_full", self.k_slots, 1, f"{LOADER} + bytes", CONSUMER, "a K tile"),
            ("k_empty", self.k_slots, 1, f"{REDUCER} when dK and dV are read", LOADER, "K may be overwritten"),
            ("v_ready", 1, 1, f"{LOADER} + bytes", CONSUMER, "a V tile; do_empty of its last block frees it"),
            ("q_full", n, 1, f"{LOADER} + bytes, or {CLEANER}", CONSUMER, "a Q tile and its lse2"),
            ("q_empty", n, 8, f"{each} after dK", LOADER, "the Q slot may be overwritten"),
            ("do_full", n, 1, f"{LOADER} + bytes, or {CLEANER}", CONSUMER, "a dO tile and its dpsum"),
            ("do_empty", n, 8, f"{each} after dV", LOADER, "the dO slot may be overwritten"),
            ("q_raw", n, 1, f"{LOADER} + bytes", CLEANER, "a Q tile with dead rows"),
            ("do_raw", n, 1, f"{LOADER} + bytes", CLEANER, "a dO tile with dead rows"),
        )
        here = ("keys_here", 1, 2, f"{CLEANER}, {WATCHER}", LOADER, "the item's keys have arrived, its sum is known")
        return _indexed((*rows, here) if self.gated else rows, 0)

    @cached_property
    def named(self) -> tuple[Barrier, ...]:
        """Named barriers; arrivals are threads. Id 0 is __syncthreads()."""
        turn = 256 + 32
        rows = [
            ("exchange", 1, 256, "all consumers", "all consumers", "dS (and P) of both warp groups"),
            ("grads_full", 1, turn, "all consumers", REDUCER, "dK and dV are staged"),
        ]
        if self.dq_reducer:
            rows += [
                ("dq_full", 2, 128 + 32, "a warp group", REDUCER, "the group's part of a dQ tile"),
                ("dq_empty", 2, 128 + 32, REDUCER, "a warp group", "the group's part may be overwritten"),
            ]
        elif self.deterministic:
            rows += [
                ("dq_full", 1, turn, "all consumers", REDUCER, "dQ of the block has been added"),
                ("dq_empty", 1, turn, REDUCER, "all consumers", "it is this tile's turn to add"),
            ]
        return _indexed(tuple(rows), 1)

    def source(self) -> CudaSource:
        """All kernels of the backward."""
        return render("attn_bwd.cu.j2", spec=self)


def _indexed(rows: tuple[tuple[str, int, int, str, str, str], ...], index: int) -> tuple[Barrier, ...]:
    out = []
    for name, slots, arrivals, arrives, waits, guards in rows:
        out.append(Barrier(name, index, slots, arrivals, arrives, waits, guards))
        index += slots
    return tuple(out)


@cache
def select_backward(form: MaskForm, head_dim: int, dtype: Dtype, *, deterministic: bool = False) -> BackwardSpec:
    """The shipped variant.

    Tiles follow from the head dim: 64 x 128 (rows x keys) at 128, where registers are full; 128 x 128 at 64; 64 x 64 at
    256.
    """
    block_q = 128 if head_dim == 64 else 64
    block_kv = 64 if head_dim == 256 else 128
    # As much of V in registers as bounds and a block table leave room for.
    if head_dim == 64:
        v_steps, v_more = 2, 0
    elif form.blocks:
        v_steps, v_more = 0, 0
    elif head_dim == 128 and (form.causal or form.vectors):
        v_steps, v_more = (1 if len(form.vectors) > 3 else 2), 2
    else:
        v_steps, v_more = 4, 0
    return BackwardSpec(
        head_dim,
        dtype,
        form,
        deterministic,
        block_q,
        block_kv,
        k_slots=1 if head_dim == 256 else 2,
        v_steps=v_steps,
        v_more=v_more,
    )

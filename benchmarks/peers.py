"""The kernels that maskc is measured against, as one table: name, probe, what it can do, prepare, forward.

A peer that cannot be imported is reported as absent, never faked. Every peer gets its tensors in the layout it likes
best and its own way of preparing a mask; preparation is timed apart from the kernels. `backward` is autograd for all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.masks import MaskCase

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """`prepare(case, batch)` turns a mask into a forward function on tensors of layout `layout`."""

    name: str
    layout: str  # "bshd" or "bhsd"
    probe: Callable[[], str | None]  # None, or why the peer is absent
    supports: Callable[[MaskCase], bool]
    prepare: Callable[[MaskCase, int], Forward]


def mask_mod(case: MaskCase, device: torch.device) -> MaskMod | None:
    """The mask as its users write it for FlexAttention: indices captured as tensors, no interval vectors. None: full."""
    ids = _ids(case.lengths, case.seqlen, device)
    match case.name:
        case "full":
            return None
        case "causal":
            return lambda b, h, q, k: q >= k
        case "sliding_window":
            return lambda b, h, q, k: (q >= k) & (q - k < case.window)
        case "causal_document":
            return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)
        case "document":
            return lambda b, h, q, k: ids[q] == ids[k]
        case "share_question":
            assert case.parts is not None
            flat = [n for doc in case.parts for n in doc]
            first = [i == 0 for doc in case.parts for i in range(len(doc))]
            part = _ids(flat, case.seqlen, device)
            question = torch.tensor(first, device=device)[part]
            return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k) & (question[k] | (part[q] == part[k]))
        case "global_sliding_window":
            return lambda b, h, q, k: (k < case.globals) | (q < case.globals) | ((q - k <= case.window) & (k - q <= case.window))
        case "causal_blockwise":
            assert case.lengths is not None
            last = case.seqlen - case.lengths[-1]
            return lambda b, h, q, k: (q >= k) & ((ids[q] == ids[k]) | (q >= last))
        case "prefix_lm_document":
            assert case.lengths is not None
            assert case.prefixes is not None
            starts = [sum(case.lengths[:i]) for i in range(len(case.lengths))]
            ends = [start + prefix for start, prefix in zip(starts, case.prefixes, strict=True)]
            prefix_end = torch.tensor(ends, dtype=torch.int32, device=device)[ids]
            return lambda b, h, q, k: (ids[q] == ids[k]) & ((q >= k) | (k < prefix_end[k]))
        case "prefix_lm_causal":
            return lambda b, h, q, k: (q >= k) | (k < case.prefix)
        case "qk_sparse":
            drop = torch.zeros(case.seqlen, dtype=torch.int32, device=device)
            for i, (start, end) in enumerate(case.drop or ()):
                drop[start:end] = i + 1
            return lambda b, h, q, k: (q >= k) & ((drop[k] == 0) | (drop[q] != drop[k]))
        case "random_eviction":
            assert case.evict is not None
            evict = case.evict.to(device)
            return lambda b, h, q, k: (q >= k) & (q < evict[h, k])
        case _:
            raise ValueError(f"no mask_mod for {case.name}")


def _ids(lengths: Any, seqlen: int, device: torch.device) -> torch.Tensor:
    """int32, half of what a kernel would read of the default dtype."""
    if not lengths:
        return torch.zeros(seqlen, dtype=torch.int32, device=device)
    counts = torch.tensor(lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device=device), counts, output_size=seqlen)


# ---------------------------------------------------------------- the table


BLOCK = 128  # rows and keys of a block of a BlockMask
CELLS_AT_ONCE = 1 << 28  # of a mask that becomes one
_COMPILED: dict[str, Any] = {}  # once per model, not per mask


def _maskc(case: MaskCase, batch: int) -> Forward:
    import maskc

    spec = (_COMPILED.get(case.mask) or _COMPILED.setdefault(case.mask, maskc.compile(case.mask))).bind(
        nq=case.seqlen, nk=case.seqlen, **_on_gpu(case.inputs)
    )
    return lambda q, k, v: maskc.run(spec, q, k, v, backend="hopper")


def _on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _flex(case: MaskCase, batch: int, kernel_options: dict[str, str] | None = None) -> Forward:
    from torch.nn.attention.flex_attention import flex_attention

    attend = _COMPILED.setdefault("flex", torch.compile(flex_attention, dynamic=False))
    mod = mask_mod(case, torch.device("cuda"))
    heads = case.heads if case.name == "random_eviction" else 1
    blocks = None if mod is None else block_mask(mod, heads, case.seqlen, torch.device("cuda"))
    return lambda q, k, v: attend(q, k, v, block_mask=blocks, kernel_options=kernel_options)


def block_mask(mod: MaskMod, heads: int, seqlen: int, device: torch.device) -> BlockMask:
    """create_block_mask(mod, None, heads, seqlen, seqlen), some rows at a time; seqlen: a multiple of BLOCK.

    That one takes a byte per cell of all heads at once, 137 GB for 32 of them at 65536, or up to a minute to compile.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size = seqlen // BLOCK
    partial, full = (torch.empty(1, heads, size, size, dtype=torch.int32, device=device) for _ in range(2))
    keys, b = torch.arange(seqlen, device=device), torch.zeros((), dtype=torch.int64, device=device)
    at_once = max(1, CELLS_AT_ONCE // (BLOCK * seqlen))
    for h in range(heads):
        for first in range(0, size, at_once):
            end = min(first + at_once, size)
            rows = torch.arange(BLOCK * first, BLOCK * end, device=device)
            tiles = mod(b, torch.tensor(h, device=device), rows[:, None], keys).view(-1, BLOCK, size, BLOCK)
            whole = tiles.all(3).all(1)
            full[0, h, first:end] = whole
            partial[0, h, first:end] = tiles.any(3).any(1) & ~whole
    counts = [t.sum(3, dtype=torch.int32) for t in (partial, full)]
    indices = [t.argsort(descending=True, stable=True).int() for t in (partial, full)]
    return BlockMask.from_kv_blocks(
        counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=(seqlen, seqlen)
    )


def _flex_flash_absent() -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("cutlass") is None:
        return "flash_attn.cute is not installed"
    return None


def _cudnn(case: MaskCase, batch: int) -> Forward:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.name == "causal")

    return forward


def _absent(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) is not None else f"{module} is not installed"


def _unwritten(case: MaskCase, batch: int) -> Forward:
    raise RuntimeError("this peer was not installed when the benchmark was written; add its call here")


PEERS: tuple[Peer, ...] = (
    Peer("maskc", "bshd", lambda: None, lambda case: True, _maskc),
    Peer("flex", "bhsd", lambda: None, lambda case: True, _flex),
    Peer(
        "flex-flash",
        "bhsd",
        _flex_flash_absent,
        lambda case: True,
        lambda case, batch: _flex(case, batch, {"BACKEND": "FLASH"}),
    ),
    Peer("cudnn", "bhsd", lambda: None, lambda case: case.name in ("full", "causal"), _cudnn),
    Peer("flashmask", "bshd", _absent("flash_mask"), lambda case: True, _unwritten),
    Peer("magi", "bshd", _absent("magi_attention"), lambda case: case.name != "random_eviction", _unwritten),
)

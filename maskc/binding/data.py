"""What users hand in -> integer tensors: lists, ragged lists, numpy arrays and tensors, each refused with its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.binding.constructors import SetSource
from maskc.diagnostics import MaskcError, Span, error, shortened

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Named:
    """An input as messages speak of it: "segments `doc`: cu_seqlens", "`prefix`"."""

    text: str
    span: Span | None = None

    def error(self, code: str, message: str, hint: str | None = None) -> MaskcError:
        return error(code, f"{self.text} {message}", self.span, hint)


def integers(value: object, what: Named) -> Tensor:
    """An integer or bool tensor of the value, where it is. Raises M412 for anything else."""
    tensor = value.detach() if isinstance(value, Tensor) else _from_host(value, what)
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kinds = ("meta", tensor.is_meta), ("nested", tensor.is_nested), ("quantized", tensor.is_quantized)
        kind = next((name for name, has in kinds if has), str(tensor.layout).removeprefix("torch."))
        raise what.error("M412", f"is a {kind} tensor, which has no numbers to read", "give a dense tensor")
    if tensor.numel() == 0:
        return tensor.to(torch.int64)
    if tensor.is_floating_point() or tensor.is_complex():
        raise what.error("M412", f"holds {_plain(tensor.dtype)} numbers, not integers", "cast them: x.to(torch.int32)")
    return tensor if tensor.dtype in (torch.bool, torch.int32) else tensor.to(torch.int64)


def rows(value: object, what: Named, fill: str) -> tuple[Tensor, list[int] | None]:
    """As `integers`, but unequal lists, arrays or tensors in a list are padded to a rectangle: (tensor, length of each or None).

    fill: "zero", or "last" to repeat the last entry of a list.
    """
    if not _is_ragged(value):
        return integers(value, what), None
    assert isinstance(value, Sequence)
    lists = [integers(item, what) for item in value]
    tails = {item.shape[1:] for item in lists if item.shape[0]}
    if len(tails) > 1:
        raise what.error("M412", "mixes lists of different shapes")
    tail = tails.pop() if tails else torch.Size()
    longest = max(item.shape[0] for item in lists)
    out = torch.zeros(len(lists), longest, *tail, dtype=torch.int64, device=lists[0].device)
    for row, item in zip(out, lists, strict=True):
        if item.shape[0]:
            row[: item.shape[0]] = item
            if fill == "last":
                row[item.shape[0] :] = item[-1]
    return out, [item.shape[0] for item in lists]


_FEW = 128
"""Numbers that Python looks at sooner than tensors are set up for it."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def few(value: object) -> list[int] | None:
    """A list of integers, or a tensor [n] or [1, n] in host memory; None where there are more, or other things."""
    if type(value) is list or type(value) is tuple:
        return [*value] if len(value) <= _FEW and all(type(x) is int for x in value) else None
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS or value.device.type != "cpu" or value.numel() > _FEW:
        return None
    if value.layout is not torch.strided or value.is_nested or not 1 <= value.ndim <= 2 or value.shape[:-1].numel() != 1:
        return None
    numbers: list[int] = value.flatten().tolist()
    return numbers


def _is_ragged(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value or _length(value[0]) is None:
        return False
    lengths = {_length(x) for x in value}
    return len(lengths) > 1 and None not in lengths


def _length(value: object) -> int | None:
    """Of a list, a tensor or an array that has an axis."""
    if isinstance(value, list | tuple):
        return len(value)
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return shape[0] if shape else None


def _from_host(value: object, what: Named) -> Tensor:
    if _is_ragged(value):
        assert isinstance(value, Sequence)
        found = " and ".join(str(n) for n in sorted({_length(x) or 0 for x in value}))
        raise what.error("M413", f"has rows of {found} values", "give rows of one length; `ids` may be padded, see `pad`")
    listed = isinstance(value, list | tuple) and bool(value) and hasattr(value[0], "shape")
    for read in (_by_parts, torch.tensor) if listed else (torch.tensor, _by_parts):
        try:
            return read(value)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise what.error("M412", f"cannot be read as integers: {shortened(repr(value))}", "give a list, a numpy array or a tensor")


def _by_parts(value: object) -> Tensor:
    """A list of tensors or arrays of one shape; an array that torch does not read (negative strides, another byte order)."""
    if isinstance(value, list | tuple):
        return torch.stack([torch.as_tensor(x) for x in value])
    return torch.tensor(value.tolist())  # type: ignore[attr-defined]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors among the data of one input."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SetSource):
        yield from tensors_in(value.data)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor | SetSource | list | tuple):
                yield from tensors_in(item)


FEW_NUMBERS = 4096
"""That are read before they are checked: checks of so few take less on the host than their launches on a GPU."""


def on_host(inputs: Mapping[str, object]) -> Mapping[str, object]:
    """The inputs, some on a GPU, with copies in host memory where they are few integers: one transfer, which is waited for."""
    held = [t for value in inputs.values() for t in tensors_in(value)]
    plain = all(t.layout is torch.strided and not (t.is_meta or t.is_floating_point() or t.is_complex()) for t in held)
    if not plain or sum(t.numel() for t in held) > FEW_NUMBERS:
        return inputs
    there = [t.detach() for t in held if t.device.type != "cpu"]
    alike = there if len({t.dtype for t in there}) == 1 else [t.to(torch.int64) for t in there]
    copies = iter([copy.to(t.dtype) for copy, t in zip(moved(alike, torch.device("cpu")), there, strict=True)])

    def here(value: object) -> object:  # comes upon tensors in the order of `tensors_in`
        if isinstance(value, Tensor):
            return value if value.device.type == "cpu" else next(copies)
        if isinstance(value, SetSource):
            return SetSource(value.kind, value.form, here(value.data), value.pad)
        return [here(x) for x in value] if any(True for _ in tensors_in(value)) and isinstance(value, list | tuple) else value

    return {name: here(value) for name, value in inputs.items()}


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """As `move`, small tensors of one dtype in one transfer: each costs the host some launches' time. They share memory then."""
    small = [i for i, t in enumerate(tensors) if t.device != device and t.numel() <= FEW_NUMBERS]
    out = list(tensors)
    for dtype in {tensors[i].dtype for i in small}:
        those = [i for i in small if tensors[i].dtype == dtype]
        if len(those) > 1:
            flat = move(torch.cat([tensors[i].reshape(-1) for i in those]), device)
            parts = torch.split(flat, [tensors[i].numel() for i in those])
            for i, part in zip(those, parts, strict=True):
                out[i] = part.view(tensors[i].shape)
    return [move(t, device) for t in out]


MOST_BAKED = 1 << 18
"""Bytes that a CUDA graph takes as constants: some 350 short kernels at each replay."""


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. Only a copy to the host is waited for: whoever reads it there could not tell when it has come.

    Into a CUDA graph what the host holds goes as constants: a replay could not copy from memory that nobody keeps. Raises
    M420 where it is too much.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_current_stream_capturing():
        return _baked(tensor, device)
    return tensor.to(device, non_blocking=device.type != "cpu")


def _baked(tensor: Tensor, device: torch.device) -> Tensor:
    """Made by kernels that have the numbers among their arguments."""
    size = tensor.numel() * tensor.element_size()
    if size > MOST_BAKED:
        held = f"{tensor.numel()} numbers of a mask come into a CUDA graph from the host, which takes {MOST_BAKED >> 10} KiB"
        raise error("M420", held, None, "run the mask once before the capture, or bind tensors of that GPU")
    raw = tensor.contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -size % 8)).view(torch.int64)
    out = torch.zeros(words.numel(), dtype=torch.int64, device=device)
    if size:
        torch._foreach_add_([*out.unbind()], words.tolist())
    return out.view(torch.uint8)[:size].view(tensor.dtype).view(tensor.shape)

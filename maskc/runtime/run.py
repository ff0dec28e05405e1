"""`maskc.run` for a bound mask: every argument is checked, then one operator call (or the context-parallel run)."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from maskc.binding.bound import BoundMask, Prepare
from maskc.binding.modes import lasting, outside
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import Diagnostic, MaskcError, MaskcTypeError, MaskcWarning, error
from maskc.runtime import cpu, flex, ops, reorder

if TYPE_CHECKING:
    from maskc.runtime.plan import AttentionPlan

BACKENDS = ("auto", "cpu", "hopper", "flex")
KEYWORDS = ("group", "plan", "strategy", "scale", "return_lse", "deterministic", "backend")

# Keywords of other attention calls, and what maskc has in their place.
_ELSEWHERE = {
    "sink": "attention sinks are not supported; a key that every row sees is `k < sinks` in the mask",
    "sinks": "attention sinks are not supported; a key that every row sees is `k < sinks` in the mask",
    "softcap": "score capping is not supported",
    "dropout": "dropout is not supported",
    "dropout_p": "dropout is not supported",
    "is_causal": 'causality is part of the mask: "std:causal", or `k <= q` in your own',
    "causal": 'causality is part of the mask: "std:causal", or `k <= q` in your own',
    "attn_mask": "the mask is the first argument",
    "attention_mask": "the mask is the first argument; padding is `segments(ids=..., pad=...)`",
    "mask": "the mask is the first argument",
    "block_mask": "the mask is the first argument; a table of blocks is `input keep : bool per block(128, 128)`",
    "mask_mod": "the mask is the first argument, a `.mask` file or text",
    "score_mod": "scores cannot be changed, only masked",
    "bias": "scores cannot be changed, only masked",
    "attn_bias": "scores cannot be changed, only masked",
    "alibi_slopes": "scores cannot be changed, only masked",
    "window_size": 'a window is part of the mask: "std:sliding_window", or `q < k + window` in your own',
    "cu_seqlens": "documents are an input of the mask: doc=maskc.segments(cu_seqlens=...)",
    "cu_seqlens_q": "documents are an input of the mask: doc=maskc.segments(cu_seqlens=...)",
    "max_seqlen_q": "it is not needed; documents are an input of the mask: doc=maskc.segments(cu_seqlens=...)",
    "key_padding_mask": "the mask is the first argument; padding is `segments(ids=..., pad=...)`",
    "return_attn_probs": "probabilities are never made; their log-sum-exp comes with `return_lse=True`",
    "softmax_scale": "it is called `scale`",
    "enable_gqa": "fewer kv heads than query heads need no flag",
}


def run(
    spec: BoundMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    *,
    plan: AttentionPlan | None = None,
    strategy: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over k and v under a bound mask; see `maskc.run`."""
    signature = None
    if group is None and plan is None and strategy == "auto" and type(return_lse) is bool:
        signature = _signature(spec, q, k, v, scale, deterministic, backend)
        if signature is not None and (call := spec.call(signature)) is not None:
            return _results(call, q, k, v, return_lse)
    how = {"plan": plan, "strategy": strategy, "scale": scale, "deterministic": deterministic, "backend": backend}
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        return lasting(run)(spec, q, k, v, group, return_lse=return_lse, **how)  # type: ignore[arg-type]
    if backend not in BACKENDS:
        raise _unknown_backend(backend)
    if not isinstance(spec, BoundMask):
        raise _type_error(
            "M511",
            f"spec is {type(spec).__name__}, not a bound mask",
            _instead_of(spec),
        )
    for name, switch in (("deterministic", deterministic), ("return_lse", return_lse)):
        if not isinstance(switch, bool):
            raise _type_error("M511", f"{name} is {switch!r}, not True or False")
    _refuse_transforms(q, k, v)
    packed = isinstance(q, Tensor) and q.ndim == 3
    if packed:
        q, k, v = (x[None] if isinstance(x, Tensor) and x.ndim == 3 else x for x in (q, k, v))
    q, k, v = _autocast(q, k, v)
    if group is not None and _world_size(group) > 1:
        out, lse = _attend_together(spec, q, k, v, group, how)
    else:
        if group is None and (plan is not None or strategy != "auto"):
            name, hint = "plan" if plan is not None else "strategy", "run(spec, q, k, v, group, ...)"
            raise error("M512", f"`{name}` says how ranks share the work, but no group was given", None, hint)
        check_tensors(q, k, v)
        if not torch.compiler.is_compiling():  # sizes of the data must not become guards of a graph
            check_layout(spec, q, k)
        if group is not None:
            _check_share_of_one(spec, q, k, plan, strategy)
        out, lse = _attend_alone(spec, q, k, v, scale_of(q, scale), deterministic, backend_for(q, backend), signature)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _signature(
    spec: BoundMask, q: Tensor, k: Tensor, v: Tensor, scale: float | None, deterministic: bool, backend: str
) -> tuple[object, ...] | None:
    """What decides whether and how a call runs, so that it is checked once; None where more has a part in that.

    Such as graphs, modes, transforms and subclasses, and arguments that equal others of another type.
    """
    if (
        ops.looked_at(q, k, v)
        or not isinstance(spec, BoundMask)
        or spec.compiled.kernels is not None
        or not (scale is None or type(scale) is float)
        or type(deterministic) is not bool
        or type(backend) is not str
        or torch.is_inference_mode_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    for x in (q, k, v):
        if x.layout is not torch.strided or x.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
    device = q.device
    if device.type not in ops.BY_DEVICE or torch.is_autocast_enabled(device.type):
        return None
    where = device, k.device, v.device
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *where, scale, deterministic, backend


def _results(call: ops.Call, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Of a call that was checked."""
    if q.ndim == 4:
        out, lse = call(q, k, v)
    else:
        out, lse = (x[0] for x in call(*(x[None] if x.ndim == 3 else x for x in (q, k, v))))
    return (out, lse) if return_lse else out


def _attend_together(
    spec: BoundMask, q: Tensor, k: Tensor, v: Tensor, group: Any, shared: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """This rank's part among several; the context-parallel runtime compares the ranks before it checks anything."""
    from maskc.runtime import context_parallel

    if spec.compiled.kernels is not None and isinstance(q, Tensor) and q.is_cuda:
        from maskc.runtime.loaded import refuse_group

        refuse_group(spec.compiled.kernels)
    return cast(tuple[Tensor, Tensor], context_parallel.run(spec, q, k, v, group, return_lse=True, **shared))


def _check_share_of_one(spec: BoundMask, q: Tensor, k: Tensor, plan: AttentionPlan | None, strategy: str) -> None:
    """In a group of one a plan moves nothing, but it must be the plan of this call (M706, M707, M710, M713)."""
    from maskc.runtime import context_parallel
    from maskc.runtime.schedule import check_strategy

    check_strategy(strategy)
    if plan is not None:
        context_parallel.check_plan(plan, 1, 0, q, k)
        if not torch.compiler.is_compiling():  # the digest is of data, which a graph does not look at
            plan.part(spec)


def _attend_alone(
    spec: BoundMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    deterministic: bool,
    backend: str,
    signature: tuple[object, ...] | None,
) -> tuple[Tensor, Tensor]:
    """The whole call on one device, by a named backend; kept under its signature where the next one is the same but for data."""
    vectors = vectors_for(spec, q, k)
    check_backend(backend, vectors, q, k, v, scale)
    if backend == "flex":
        return flex.attention(vectors, q, k, v, scale)
    schedule: tuple[Tensor, ...] = ()
    if backend == "hopper":
        if spec.compiled.kernels is not None:
            from maskc.runtime.loaded import check_kernels

            gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            check_kernels(spec.compiled.kernels, vectors, q, gradients=gradients, deterministic=deterministic)
        elif (order := reorder.reordered(spec, vectors, q, k)) is not None:
            spec, vectors, signature = order.mask, order.vectors, None
            k, v = reorder.take_keys(k, order), reorder.take_keys(v, order)
        make = None if torch.compiler.is_compiling() else ops.backend_module("hopper").schedule
        schedule = spec.schedule(vectors, q.shape[3], make)
    if signature is not None:
        call = ops.call_of(backend, vectors, schedule, scale, deterministic, q, k)
        spec.keep_call(signature, call, vectors, q.device, q.shape[3] if schedule else None)
        return call(q, k, v)
    return ops.attention(vectors, q, k, v, scale, deterministic=deterministic, schedule=schedule)


# ---------------------------------------------------------------- arguments


def check_keywords(given: Iterable[str], inputs: Iterable[str]) -> None:
    """Raise M501 for keywords that are neither arguments of `run` nor inputs of the mask."""
    known = tuple(inputs)
    wrong = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *KEYWORDS), 1)
            listed = f"inputs of the mask: {', '.join(known)}" if known else "the mask has no inputs to give here"
            hint = _ELSEWHERE.get(name) or (
                f"did you mean `{near[0]}`?" if near else f"keywords: {', '.join(KEYWORDS)}; {listed}"
            )
            wrong.append(Diagnostic("M501", f"maskc.run has no keyword `{name}`", help=hint))
    if wrong:
        raise MaskcTypeError(wrong)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under `torch.autocast` its dtype, as for SDPA: whatever is not fp64 is cast."""
    kind = q.device.type if isinstance(q, Tensor) else ""
    if kind not in ops.BY_DEVICE or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)
    )
    return q, k, v


def _refuse_transforms(*tensors: object) -> None:
    """Raise M516 inside a transform of `torch.func` and for dual tensors: the operators have neither batching nor tangents.

    Torch would run them on such tensors and give a tangent of zeros.
    """
    if torch.compiler.is_compiling():
        wrong = forward_ad._current_level >= 0
    else:
        given = [x for x in tensors if isinstance(x, Tensor)]
        wrong = any(map(torch._C._functorch.is_functorch_wrapped_tensor, given))
        if not wrong and forward_ad._current_level >= 0:
            wrong = any(forward_ad.unpack_dual(x).tangent is not None for x in given)  # type: ignore[no-untyped-call]
    if wrong:
        hint = "derivatives: tensor.backward() or torch.autograd.grad; several items: the batch axis of q, k and v"
        raise error("M516", "q, k or v is inside a function transform (vmap, grad, jvp) or forward-mode AD", None, hint)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv] agree in shape, dtype and device (M503 to M506)."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise _type_error("M511", f"{name} is {type(x).__name__}, not a tensor")
        if x.layout is not torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise _type_error("M511", f"{name} is a {kind} tensor, not a dense one", _PACKED if x.is_nested else None)
        if type(x) is not Tensor and hasattr(x, "device_mesh"):
            raise _type_error("M511", f"{name} is a {type(x).__name__}, spread over a device mesh", _LOCAL)
        if x.ndim != 4:
            raise error("M503", f"{name} has shape {tuple(x.shape)}, not [B, S, H, D] or packed [T, H, D]")
    if not q.device == k.device == v.device:
        raise error("M504", "q, k and v are on different devices: " + _listed(named, "device"), None, "move them to one")
    if not q.dtype == k.dtype == v.dtype:
        raise error("M505", "q, k and v have different dtypes: " + _listed(named, "dtype"), None, "cast them to one")
    if not q.dtype.is_floating_point:
        raise error("M505", f"q, k and v are {q.dtype}, not floating point")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise error("M503", f"q, k and v have different batch sizes: {_shapes(named)}")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise error("M503", f"k and v differ in keys or heads: {_shapes(named)}")
    if q.shape[3] != k.shape[3]:
        raise error("M503", f"q and k differ in head dim: {_shapes(named)}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise error("M503", f"a head dim is 0: {_shapes(named)}")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise error(
            "M506",
            f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly: {_shapes(named)}",
            None,
            "layout is [B, S, H, D]",
        )


def _shapes(named: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())


_PACKED = "pack it: x.values() is [T, H, D], and its documents are doc=maskc.segments(cu_seqlens=x.offsets())"
_LOCAL = "give x.to_local(); where it is the sequence that is spread, also the group: run(spec, q, k, v, mesh.get_group())"
_HEADS_FIRST = "the layout is [B, S, H, D]; for heads before rows: x.transpose(1, 2)"
MOST_HEADS = 256
"""No model has more kv heads than this."""


def check_layout(spec: BoundMask, q: Tensor, k: Tensor) -> None:
    """Raise M503, or warn (W503) where the mask has no sizes to compare with, for [B, H, S, D].

    SDPA and FlexAttention want that layout; here it would be a sequence of a few rows, with a head for each token.
    """
    tokens = q.shape[2]
    if max(q.shape[1], k.shape[1]) < tokens and tokens in (spec.nq, spec.nk, *spec.totals.values()):
        shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)} have {q.shape[1]} rows and {k.shape[1]} keys"
        raise error("M503", f"{shapes}, the mask was bound for {tokens}", None, _HEADS_FIRST)
    if k.shape[2] > max(k.shape[1], MOST_HEADS):
        says = f"k has {k.shape[1]} keys and {k.shape[2]} heads: {tuple(k.shape)}"
        warnings.warn(Diagnostic("W503", says, help=_HEADS_FIRST).render(), MaskcWarning, stacklevel=4)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor on scores: 1 / sqrt(D) by default. Raises M510 for what is no finite number."""
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    known = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not known or not -sys.float_info.max <= scale <= sys.float_info.max:
        raise _type_error("M510", f"scale = {scale!r:.60} is not a finite number", "leave it out for 1 / sqrt(D)")
    return float(scale)


def backend_for(q: Tensor, backend: str) -> str:
    """The backend that "auto" means for these tensors. Raises M507 for a backend of another device, M508 for none."""
    mine = ops.BY_DEVICE.get(q.device.type)
    if backend == "auto":
        if mine is None:
            raise error("M508", f"no backend for tensors on `{q.device}`", None, "move q, k and v to the CPU or to a CUDA device")
        if not flex.needed(q.device):
            return mine
        if not torch.compiler.is_compiling():
            flex.say_once(torch.cuda.get_device_name(q.device))
        return "flex"
    if backend != mine and backend != "flex":
        wanted = next(kind for kind, name in ops.BY_DEVICE.items() if name == backend)
        hint = f'backend "{mine}" or "auto" runs where they are' if mine is not None else f"move them: q.to({wanted!r})"
        raise error("M507", f'backend "{backend}" needs {wanted.upper()} tensors, q is on `{q.device}`', None, hint)
    return backend


def check_backend(name: str, vectors: BoundaryVectors, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Raise what keeps the backend from running this call exactly."""
    if q.shape[2] % vectors.heads:
        raise error("M506", f"the mask has {vectors.heads} heads, which do not divide {q.shape[2]} query heads")
    if name == "cpu" or not torch.compiler.is_compiling():  # in a graph a GPU backend answers when it is called
        module = cpu if name == "cpu" else ops.backend_module(name)
        if (reason := module.why_not(vectors, q, k, v)) is not None:
            raise MaskcError(reason)
    if name == "hopper" and scale <= 0:
        raise error("M525", f"scale = {scale}; the kernels need a positive scale", None, "fold the sign into q")


# ---------------------------------------------------------------- vectors


def vectors_for(spec: BoundMask, q: Tensor, k: Tensor) -> BoundaryVectors:
    """The vectors of a bound mask for these tensors. Raises M4xx where the data do not fit them, M503 for the batch."""
    home = spec.inputs.device
    if home.type != "cpu" and home != q.device:
        raise error(
            "M504", f"the inputs of the mask are on `{home}`, q is on `{q.device}`", None, "bind inputs on the device of q"
        )
    if spec.batch not in (1, q.shape[0]):
        raise error("M503", f"the mask was bound for {spec.batch} batch items, q has {q.shape[0]}")
    nq, nk, device = q.shape[1], k.shape[1], q.device
    if (kept := spec.kept_vectors(nq, nk, device)) is not None:
        return kept
    return vectors_on(spec, nq, nk, device)


@outside("call spec.vectors(nq, nk, device)")  # a graph cannot hold events
def vectors_on(spec: BoundMask, nq: int, nk: int, device: torch.device) -> BoundaryVectors:
    """The vectors of a bound mask, on a GPU by the mask's own kernel where that can run, else by torch."""
    prepare: Prepare | None = None
    if device.type == "cuda":
        import maskc.runtime.prep as prep

        prepare = prep.vectors if prep.why_not(spec.compiled, device) is None else None
    return spec.vectors(nq, nk, device, prepare)


# ---------------------------------------------------------------- small things


def _world_size(group: Any) -> int:
    """Ranks of a process group. Raises M511 for what is none, and on ranks that do not belong to it."""
    from torch import distributed

    if torch.compiler.is_compiling():  # groups are opaque in a graph
        return distributed.get_world_size(group)
    if isinstance(group, Tensor):  # which has a size, too
        raise _type_error("M511", "group is a tensor", "a mask comes first, as of maskc.convert.from_dense(mask)")
    if hasattr(group, "get_group"):
        raise _type_error("M511", f"group is a {type(group).__name__}", 'give the group of a dimension: mesh.get_group("cp")')
    try:
        ranks = distributed.get_world_size(group)
    except (AttributeError, TypeError, ValueError):
        raise _type_error("M511", f"group is {type(group).__name__}, not a process group") from None
    if ranks < 1:
        raise _type_error("M511", "this rank is not in the group", "only the ranks of a group call `run` with it")
    return ranks


def _listed(named: Mapping[str, Tensor], attribute: str) -> str:
    return ", ".join(f"{name} {getattr(x, attribute)}" for name, x in named.items())


def _instead_of(spec: object) -> str:
    """How what was given for a mask becomes one."""
    if type(spec).__name__ == "BlockMask":
        return "maskc.convert.from_block_mask(block_mask) makes one"
    if isinstance(spec, Tensor):
        return "of a dense bool mask maskc.convert.from_dense(visible) makes one, of offsets maskc.convert.from_cu_seqlens"
    if callable(spec):
        return "of a FlexAttention mask_mod maskc.convert.from_mask_mod(mask_mod, nq, nk) makes one"
    return 'give mask.bind(...), a compiled mask, a path or "std:..."'


def _type_error(code: str, message: str, hint: str | None = None) -> MaskcTypeError:
    return MaskcTypeError(Diagnostic(code, message, help=hint))


def _unknown_backend(backend: object) -> MaskcError:
    near = difflib.get_close_matches(str(backend), BACKENDS, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(BACKENDS)}"
    return error("M502", f"unknown backend {backend!r}", None, hint)

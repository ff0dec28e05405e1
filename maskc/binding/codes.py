"""Codes of bound data and of the Python functions: the first line is the title, the rest the text of `maskc explain`."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M401": """Segments reach past the last key.
The last segment ends after the number of keys of the batch. Ending before it is fine: the tail lies outside every segment,
sees nothing through `same` and is seen by nobody.""",
    "M402": """The data break a declared fact.
`where` and `assume` are facts that the proof of the mask rests on, so every element is checked when data are bound. The
message names the first element that breaks one, what was read there, and where the fact was declared. A fact about an
attribute of a token outside every segment is not checked for that token.""",
    "M403": """Offsets or lengths are malformed.
`cu_seqlens` starts with 0, never decreases, and holds one entry more than there are segments; `lengths` are not negative
(0 is legal: an empty segment). Offsets given for lengths are the usual cause.""",
    "M404": """An id comes back.
With `ids=` the tokens of a segment stand side by side and share a number; a number that returns after another one, or
after padding, would silently be a second segment. Number segments anew, or sort the tokens.""",
    "M405": """Positions do not restart and count.
With `positions=` the first token of a segment has position 0 and each next one is one more.""",
    "M406": """A segment does not lie in one parent.
The input was declared `within` another one: each of its segments must lie inside a single segment of the parent. An
attention pattern that crosses the border of a document would leak from one document into another.""",
    "M407": """A vector that was declared `sorted` decreases.
Rows are found in it by bisection, so equal neighbours are fine but no value may be smaller than the one before.""",
    "M408": """A value has no place in its type.
Integers must fit in 32 bits, truth values are False and True (or 0 and 1), and segments end before token 2^31.""",
    "M409": """Segments leave a hole that the mask cannot have.
The mask finds rows by the order of segments (it compares ordinals, or asks where a segment of the row starts), which
padding before or between segments would break. Put padding last, give it a segment of its own, or declare `spans`.""",
    "M410": """An input is missing.
Every input that the mask reads, and every one that those are declared by, must be given by keyword unless it has a
default.""",
    "M411": """There is no such input.
A keyword of `bind` names no input of the file. An input that no mask reads is an error as well: data that are given but
not used are nearly always a mask that is not the one you meant.""",
    "M412": """Data of the wrong kind.
Segments and spans take `maskc.segments(...)` / `maskc.spans(...)` with exactly one form: cu_seqlens, lengths, ids,
positions, eos or ranges. maskc never guesses a form from the numbers. Vectors take integers or truth values as lists,
numpy arrays or tensors; floating point numbers are refused, and truth values where numbers must stand.""",
    "M413": """Sizes disagree.
Vectors are [n], [batch, n] or [batch, heads, n]; `per head` [heads] or [batch, heads]; block tables [nQ, nK] with
leading batch and heads. n is the number of keys, rows or segments. All inputs agree on rows, keys, batch and heads,
where 1 goes with everything; the message names the two that do not. Rows and keys are counted from 0, batch items from 1.""",
    "M414": """A mask of one sequence on a rectangle.
The mask uses one set of segments for rows and keys, so it needs as many rows as keys. For cross attention declare one input
`per row` and one `per key` (see std:cross_pairs), or say `assume nq <= nk`.""",
    "M415": """The number of keys, or of heads, is not known.
No input has one value per key and no segments were given. `maskc.run` takes sizes from q and k; elsewhere give
`bind(nq=, nk=)`. A mask that reads `h` needs an input with a value for each head: one `per head`, or a vector that is bound as
[batch, heads, n]. Without one, all heads would be head 0.""",
    "M416": """A key needs more masked runs than the vectors hold.
The mask is neither proved nor refuted in general, so the data decide: this batch has a column whose masked rows form more than
two runs (beside the free triangle, where every row before the key is masked). The message lists them.""",
    "M418": """Inputs are on different devices.
Lists, numpy arrays and CPU tensors go with everything; tensors on GPUs must be on one.""",
    "M419": """Ranges are malformed.
`ranges=` holds pairs (start, end), half-open, with 0 <= start <= end, in order and without overlap.""",
    "M420": """Host data come into a CUDA graph too late, and are too many.
A graph cannot copy from ordinary host memory at each replay, so what a mask was bound from goes into it as constants, up to
256 KiB. Run the mask once before the capture, then what is on the GPU is used, or bind tensors of the GPU.""",
    "M501": """`maskc.run` has no such keyword.
Keywords are the arguments of `run` and the inputs of the mask (only where the mask is not bound yet). Nothing is ever
ignored: attention sinks, score capping and dropout are not supported, and causality, windows and documents are part of
the mask.""",
    "M502": """There is no such backend.
"auto" follows the tensors; "cpu" runs CPU tensors; "hopper" runs bf16 and fp16 CUDA tensors on H100 and H200;
"flex" runs any CUDA GPU through torch's FlexAttention.""",
    "M503": """Shapes of q, k and v do not fit together, or not the mask.
q is [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], or packed without B. A mask that was bound for several batch
items needs a q of as many.""",
    "W503": """k has more heads than any model, and fewer keys.
Most likely the heads stand before the rows, [B, H, S, D], as SDPA and FlexAttention want them. maskc takes [B, S, H, D], as
FlashAttention does: x.transpose(1, 2). Where the mask was bound for a length that q and k then do not have, it is an error.""",
    "M504": """Tensors are on different devices.
q, k and v are on one device. Inputs that were bound on a GPU stay there: bind them on the device of q (host data go with
everything).""",
    "M505": """The dtypes of q, k and v differ, or the backend has none for them.
Cast them to one of float64, float32, bfloat16 or float16 ("hopper": bfloat16 or float16).""",
    "M506": """Head counts do not divide.
Query heads share kv heads evenly: Hq is a multiple of Hk. The heads of a mask divide Hq as well. The layout is
[B, S, H, D], heads before the head dim.""",
    "M507": """A backend cannot run tensors of this device.
"cpu" needs CPU tensors and "hopper" CUDA tensors; "auto" follows the tensors.""",
    "M508": """No backend for this device.
maskc runs CPU and CUDA tensors.""",
    "M509": """Attention cannot be differentiated twice.
The backward pass is a closed form without a derivative of its own.""",
    "M510": """`scale` is no finite number.
Leave it out for 1 / sqrt(D).""",
    "M511": """An argument has the wrong type.
`run` takes a bound mask, a compiled one, a path or "std:name", then three tensors.""",
    "M512": """A plan or a strategy without a group.
Both say how the ranks of a process group share the work: run(spec, q, k, v, group, plan=plan).""",
    "M513": """Masks are compiled and bound, and their vectors made, outside of `torch.compile`.
Binding is O(n) work on data that change with every batch, not part of a graph. Bind the mask and call
`spec.vectors(nq, nk, device)` once per batch before the compiled function; inside it `maskc.run` then finds them. New data
never recompile anything.""",
    "M514": """maskc and FlexAttention disagree.
`maskc bench` compares both before it times them, and the difference is larger than rounding explains. Please report it with
the mask and its inputs.""",
    "M515": """Too much for FlexAttention on a CPU.
There it holds every score at once and has no backward: `maskc bench --device cpu` is for small sizes and few heads.""",
    "M516": """Function transforms do not reach through attention.
`torch.func` (vmap, grad, vjp, jvp, jacrev) and forward-mode AD run a function on tensors of their own, which maskc's kernels
cannot follow: there is no batching rule and no tangent. Gradients come from `backward()` or `torch.autograd.grad`; several
sequences go into the batch axis.""",
    "M517": """A compiled graph refers to a mask or a plan that is gone.
Context-parallel calls in a graph look their mask and plan up by a number. Keep both until the backward is done where saved
tensors are copied in between, as by `torch.autograd.graph.save_on_cpu`.""",
}

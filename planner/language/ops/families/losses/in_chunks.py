"""Cross entropy of a product's results, which are made and dropped a chunk of rows at a time.

The last product of a language model makes a logit for each token and each entry of the vocabulary:
the largest tensor of a step, and its probabilities in fp32 another. Here the loss takes what the
product takes. Its forward makes the logits of some rows, reduces them to a few numbers a row and
goes on; its backward makes them again, and of their gradient at once the parts of both factors'
gradients. A plan chooses it, and lowering puts it into a rank's program
(`planner.language.lowering.passes.losses_in_chunks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from planner.language.graph import Arg, Op, Ref, Symbol, TensorMeta
from planner.language.ops.call import Call, Work
from planner.language.ops.families.losses.cross_entropy import VOCAB_CROSS_ENTROPY
from planner.language.ops.families.losses.targets import MEAN
from planner.language.ops.flops import arriving_bytes, made_bytes
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import OpFamily, packet_of, register
from planner.units import DTYPE_BYTES

LOSS_IN_CHUNKS = "planner.cross_entropy_in_chunks"

_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES = 13, 14
"""Kernels of a chunk (`planner.runtime.stage.calls.losses.in_chunks`), steps apart."""
_LAUNCHES_OF_ALL = 8
"""Those for the losses of all rows, once."""


Step = tuple[Arg, ...]
"""An op on logits: its target, and its arguments behind them."""

CAST = "aten.to.dtype"


class LossInChunks(NamedTuple):
    """What such an op is given; x is [..., hidden], target has a number for each of its rows."""

    x: Ref
    """Hidden states."""
    weight: Ref
    """[vocabulary, hidden], or transposed; with an axis one rank's entries of the vocabulary."""
    bias: Ref | None
    """[vocabulary]."""
    target: Ref
    """Indices over the whole vocabulary."""
    transposed: bool
    """Whether the weight is [vocabulary, hidden], as that of a linear layer."""
    steps: tuple[Step, ...]
    """What the model does to logits entry by entry ahead of the loss: casts, factors, a tanh."""
    reduction: int
    """ATen's number."""
    ignore_index: int
    """A target that does not count."""
    smoothing: float
    """Label smoothing."""
    rows: int
    """Rows whose logits exist at a time."""
    axis: str = ""
    """Over whose ranks the vocabulary is divided; "" where it is whole."""

    def dtypes(self, made: str) -> tuple[str, ...]:
        """Dtypes of logits that a product makes so, and behind each step."""
        found = [made]
        for target, *args in self.steps:
            dtype = args[0] if target == CAST else None
            found.append(dtype.value if isinstance(dtype, Symbol) else found[-1])
        return tuple(found)

    @property
    def only_casts(self) -> bool:
        """Whether the gradient of logits is that behind all steps, in another dtype."""
        return all(target == CAST for target, *_ in self.steps)

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments of the op; an axis only where there is one."""
        return tuple(self) if self.axis else tuple(self)[:-1]


def loss_in_chunks(op: Op) -> LossInChunks | None:
    """Return what an op is given that is such a loss; None of any other."""
    return LossInChunks(*op.args) if op.target == LOSS_IN_CHUNKS else None  # type: ignore[arg-type]


class Chunk(NamedTuple):
    """The plain ops that do the work of one chunk."""

    ops: tuple[Op, ...]
    """Product, steps behind it, loss."""
    tensor: Mapping[str, TensorMeta]
    """Their tensors."""
    num_chunks: float
    """How many chunks there are; a last one of fewer rows counts as a part."""


def chunk_of(op: Op, tensor: Mapping[str, TensorMeta], *, all_rows: bool = False) -> Chunk:
    """Return a chunk of such a loss of a bound program, with names of its own; `all_rows`: one of
    all of them.
    """
    of = LossInChunks(*op.args)  # type: ignore[arg-type]
    whole = {name: tensor[name] for name in op.inputs}
    hidden, vocabulary = _sizes(of, tensor)
    total = whole[of.x.name].numel_at(1) // hidden
    rows = total if all_rows else min(of.rows, total)
    x = replace(whole[of.x.name], shape=(rows, hidden))
    target = replace(whole[of.target.name], shape=(rows,))
    wide = x.requires_grad or whole[of.weight.name].requires_grad
    logits = TensorMeta(
        name="logits",
        shape=(rows, vocabulary),
        dtype=x.dtype,
        kind="activation",
        requires_grad=wide,
    )
    metas = {**whole, x.name: x, target.name: target, "logits": logits}
    ops = [_product(of)]
    for (called, *args), dtype in zip(of.steps, of.dtypes(x.dtype)[1:], strict=True):
        (source,) = ops[-1].outputs
        name = f"{source}, stepped"
        metas[name] = replace(logits, name=name, dtype=dtype)
        ops.append(Op(name=name, target=str(called), args=(Ref(source), *args), outputs=(name,)))
    last = ops[-1].outputs[0]
    loss = op.outputs[0]
    metas[loss] = replace(tensor[loss], shape=())
    given = (Ref(last), of.target)
    ops.append(
        Op(
            name="loss",
            target=VOCAB_CROSS_ENTROPY if of.axis else "aten.cross_entropy_loss.default",
            args=(*given, MEAN, of.ignore_index, of.smoothing, of.axis) if of.axis else given,
            outputs=(loss,),
        )
    )
    return Chunk(tuple(ops), metas, total / rows)


def _product(of: LossInChunks) -> Op:
    factors = (of.x, of.weight)
    if of.transposed:
        target, args = "aten.linear.default", (*factors, *([of.bias] if of.bias else []))
    elif of.bias is None:
        target, args = "aten.mm.default", factors
    else:
        target, args = "aten.addmm.default", (of.bias, *factors)
    return Op(name="product", target=target, args=args, outputs=("logits",))


def _sizes(of: LossInChunks, tensor: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Sizes of a hidden state and of the rank's vocabulary."""
    shape = tensor[of.weight.name].shape_at(1)
    vocabulary, hidden = shape if of.transposed else shape[::-1]
    return hidden, vocabulary


# ---------------------------------------------------------------------------------------- work


def _flop(call: Call) -> float:
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    return 2.0 * prod(call.shape(of.x)) * max(call.shape(of.weight))


def _backward(call: Call, forward: Work) -> Work:
    """A product for each factor that needs a gradient. That which makes logits again is not counted
    as flop, as no recomputation is.
    """
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    needing = sum(call.tensor[ref.name].requires_grad for ref in (of.x, of.weight))
    return Work(
        flop=forward.flop * needing,
        read_bytes=arriving_bytes(call) + forward.read_bytes,
        write_bytes=made_bytes(call),
    )


def _launches(call: Call) -> tuple[int, int]:
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    chunks = -(-prod(call.shape(of.x)[:-1]) // of.rows)
    forward, backward = _FORWARD_LAUNCHES + len(of.steps), _BACKWARD_LAUNCHES + 2 * len(of.steps)
    return chunks * forward + _LAUNCHES_OF_ALL, chunks * backward


# --------------------------------------------------------------------------------------- memory


class _Held(NamedTuple):
    """Sizes of what its kernels hold."""

    rows: int
    """Rows of x."""
    chunk: int
    """Rows of a chunk, at most."""
    vocabulary: int
    """The rank's."""
    wide: int
    """Bytes of an entry in fp32, or wider."""
    steps: tuple[int, ...]
    """Bytes of an entry as the product makes it, and behind each step that makes another tensor."""


def _held(call: KernelCall) -> _Held:
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    dtypes = of.dtypes(call.tensor[of.x.name].dtype)
    sizes = tuple(DTYPE_BYTES[dtype] for dtype in dtypes)
    wide = max(DTYPE_BYTES["float32"], sizes[-1])
    hidden, vocabulary = _sizes(of, call.tensor)
    rows = call.numel(of.x.name) // hidden
    return _Held(rows, min(of.rows, rows), vocabulary, wide, sizes)


def _saved(call: KernelCall) -> Saved:
    """What the product takes, the targets, and a number for each row: the logarithm of the sum of
    exponentials. Of a mean the number of targets that count.
    """
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    held = _held(call)
    count = DTYPE_BYTES["int64"] if of.reduction == MEAN else 0
    return Saved(
        tensors=(of.x.name, of.weight.name, of.target.name),
        extra_bytes=held.rows * held.wide + count,
    )


def _scratch(call: KernelCall, *, forward: bool) -> int:
    """A chunk's logits ahead of a step and behind it; by row of all, forward four sums and backward
    the loss's gradient.
    """
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    held = _held(call)
    sizes = [*held.steps, *([held.wide] if held.wide != held.steps[-1] else [])]
    each = max(sum(sizes[at : at + 2]) for at in range(len(sizes)))
    if not forward and not of.only_casts:
        each = _through_steps(of, held)
    entries = held.chunk * held.vocabulary
    return entries * each + held.rows * held.wide * (4 if forward else 1)


def _through_steps(of: LossInChunks, held: _Held) -> int:
    """Bytes of a logit in a backward through more than casts: ahead of all steps, behind each tanh,
    which saves that, and behind all; the gradient of the last, and those around a step.
    """
    sizes, last = held.steps, len(of.steps)
    saves = [packet_of(str(target)) == "tanh" for target, *_ in of.steps]
    logits = sizes[0] + sum(sizes[at] for at in range(1, last + 1) if saves[at - 1] or at == last)
    cast = sizes[-1] if sizes[-1] != held.wide else 0
    around = max(sizes[at - 1] + (sizes[at] if at < last else 0) for at in range(1, last + 1))
    return logits + held.wide + cast + around


register(
    OpFamily(
        name="cross entropy of a product in chunks",
        targets=(LOSS_IN_CHUNKS,),
        arithmetic="matmul",
        flop=_flop,
        backward=_backward,
        kernels=_launches,
        saved=_saved,
        scratch=_scratch,
        recomputed=False,
    )
)

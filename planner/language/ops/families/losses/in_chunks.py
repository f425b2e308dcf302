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
from planner.language.ops.record import OpFamily, register
from planner.units import DTYPE_BYTES

LOSS_IN_CHUNKS = "planner.cross_entropy_in_chunks"

_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES = 14, 15
"""Kernels of a chunk, op by op (`planner.runtime.stage.calls.losses.in_chunks`)."""
_LAUNCHES_OF_ALL = 8
"""Those for the losses of all rows, once."""


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
    cast: Symbol | None
    """Dtype that the model casts logits to, if it does."""
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
    """Product, cast where there is one, loss."""
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
    if of.cast is not None:
        metas["cast logits"] = replace(logits, name="cast logits", dtype=of.cast.value)
        args = (Ref("logits"), of.cast)
        ops.append(Op(name="cast", target="aten.to.dtype", args=args, outputs=("cast logits",)))
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
    return chunks * _FORWARD_LAUNCHES + _LAUNCHES_OF_ALL, chunks * _BACKWARD_LAUNCHES


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
    narrow: int
    """Bytes of an entry as the product makes it, where that is cast; else 0."""


def _held(call: KernelCall) -> _Held:
    of = LossInChunks(*call.op.args)  # type: ignore[arg-type]
    made = call.element_bytes(of.x.name)
    last = DTYPE_BYTES[of.cast.value] if of.cast is not None else made
    wide = max(DTYPE_BYTES["float32"], last)
    hidden, vocabulary = _sizes(of, call.tensor)
    rows = call.numel(of.x.name) // hidden
    return _Held(rows, min(of.rows, rows), vocabulary, wide, made if wide != made else 0)


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
    """A chunk's logits as they are made and as they are cast; by row of all, forward four sums and
    backward the loss's gradient.
    """
    held = _held(call)
    chunk = held.chunk * held.vocabulary * (held.wide + held.narrow)
    return chunk + held.rows * held.wide * (4 if forward else 1)


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
        eager="it makes logits and their loss in chunks, which adds to gradients as it goes",
    )
)

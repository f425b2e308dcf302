"""Work of one op: flop, bytes read and written, forward and backward; torch-free.

Counts follow the usual conventions: a multiply-add is 2 flop; causal attention counts
half of the score matrix; views move nothing. Backward counts what autograd computes for
the inputs that need a gradient: one matrix product per such operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from planner.graph import Op, Ref, TensorMeta
from planner.units import DTYPE_BYTES

VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "view_as", "flatten", "unflatten", "as_strided"),
        *("transpose", "permute", "t", "numpy_T", "mT", "movedim", "swapaxes", "diagonal"),
        *("unsqueeze", "squeeze", "expand", "expand_as", "slice", "select", "narrow", "unfold"),
        *("split", "split_with_sizes", "chunk", "unbind", "detach", "alias"),
    )
)
"""Ops that yield a view. `reshape` may copy when its input is not contiguous; a copy then
costs little beside the op that made it so."""

MATMULS = frozenset(
    ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "addmv", "mv", "dot", "einsum")
)
ATTENTION = frozenset(
    (
        "scaled_dot_product_attention",
        "causal_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
)
CONVOLUTIONS = frozenset(["conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d"])

# Flop per output element of ops that are more than one operation; others count one. They
# are bound by memory on every device, so only the order of magnitude matters.
_POINTWISE_FLOP = {
    "gelu": 10,
    "silu": 5,
    "tanh": 5,
    "sigmoid": 4,
    "softmax": 5,
    "_softmax": 5,
    "log_softmax": 5,
    "_log_softmax": 5,
    "layer_norm": 8,
    "native_layer_norm": 8,
    "rms_norm": 5,
    "group_norm": 8,
    "batch_norm": 8,
    "batch_norm_by_channel": 8,
    "vocab_log_softmax": 5,
    "dropout": 2,
    "cross_entropy_loss": 6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Flop done and bytes moved by one execution."""

    flop: float
    read_bytes: float
    write_bytes: float

    @property
    def num_bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


def packet_of(target: str) -> str:
    """``aten.linear.default`` → ``linear``."""
    return target.split(".")[1]


def op_work(op: Op, tensor: Mapping[str, TensorMeta]) -> Work:
    """Return the forward work of an op of a bound program (every size a number)."""
    packet = packet_of(op.target)
    if packet in VIEWS or packet == "redistribute" or _is_noop_cast(op, packet, tensor):
        return Work(flop=0.0, read_bytes=0.0, write_bytes=0.0)
    outs = [tensor[name] for name in op.outputs]
    ins = [tensor[name] for name in dict.fromkeys(op.inputs)]
    read = float(sum(_bytes(t) for t in ins))
    write = float(sum(_bytes(t) for t in outs))
    if packet == "embedding":  # reads the rows it gathers, not the table
        read = write + _bytes(tensor[op.inputs[1]])
    return Work(flop=_forward_flop(op, packet, tensor, outs), read_bytes=read, write_bytes=write)


def backward_work(op: Op, tensor: Mapping[str, TensorMeta], forward: Work | None = None) -> Work:
    """Return the backward work of an op; none if no input needs a gradient.

    `forward` is its forward work, where the caller has it.
    """
    packet = packet_of(op.target)
    forward = forward or op_work(op, tensor)
    needing = [n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad]
    if not needing or forward.num_bytes == 0:
        return Work(flop=0.0, read_bytes=0.0, write_bytes=0.0)
    grads_in = float(sum(_bytes(tensor[n]) for n in op.outputs))
    grads_out = float(sum(_bytes(tensor[n]) for n in needing))
    if packet in ATTENTION:  # scores again, then dV, dP, dQ, dK: 5 products against 2
        flop = 2.5 * forward.flop
        return Work(flop=flop, read_bytes=forward.num_bytes + grads_in, write_bytes=grads_out)
    if packet in MATMULS | CONVOLUTIONS:
        operands = [n for n in needing if len(tensor[n].shape) > 1]
        # Each operand's gradient reads the output's gradient and the other operand.
        read = grads_in * max(1, len(operands)) + forward.read_bytes
        return Work(flop=forward.flop * len(operands), read_bytes=read, write_bytes=grads_out)
    if packet == "embedding":
        return Work(flop=grads_in, read_bytes=grads_in, write_bytes=grads_out + grads_in)
    return Work(
        flop=2.0 * forward.flop, read_bytes=grads_in + forward.read_bytes, write_bytes=grads_out
    )


def _bytes(meta: TensorMeta) -> int:
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]


def _numel(meta: TensorMeta) -> int:
    return prod(meta.shape_at(1))


def _is_noop_cast(op: Op, packet: str, tensor: Mapping[str, TensorMeta]) -> bool:
    return packet == "to" and tensor[op.inputs[0]].dtype == tensor[op.outputs[0]].dtype


def _forward_flop(
    op: Op, packet: str, tensor: Mapping[str, TensorMeta], outs: list[TensorMeta]
) -> float:
    out_numel = sum(_numel(t) for t in outs)
    if packet == "linear":
        return 2.0 * out_numel * tensor[op.inputs[1]].shape_at(1)[-1]
    if packet in ("addmm", "baddbmm", "addmv"):
        return 2.0 * out_numel * tensor[op.inputs[1]].shape_at(1)[-1]
    if packet == "einsum":
        return _einsum_flop(op, tensor)
    if packet in MATMULS:
        return 2.0 * out_numel * tensor[op.inputs[0]].shape_at(1)[-1]
    if packet in CONVOLUTIONS:
        weight = tensor[op.inputs[1]].shape_at(1)
        transposed = "transpose" in packet
        image = _numel(tensor[op.inputs[0]]) if transposed else out_numel
        return 2.0 * image * prod(weight[1:])
    if packet in ATTENTION:
        return _attention_flop(op, tensor)
    return float(out_numel * _POINTWISE_FLOP.get(packet, 1))


def _einsum_flop(op: Op, tensor: Mapping[str, TensorMeta]) -> float:
    equation = str(op.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, name in zip(equation, op.inputs, strict=False):
        sizes.update(zip(letters, tensor[name].shape_at(1), strict=False))
    return 2.0 * prod(sizes.values())


def _attention_flop(op: Op, tensor: Mapping[str, TensorMeta]) -> float:
    query, key, value = (tensor[name].shape_at(1) for name in op.inputs[:3])
    scores = prod(query[:-1]) * key[-2]
    flop = 2.0 * scores * query[-1] + 2.0 * scores * value[-1]
    kwargs = dict(op.kwargs)
    causal = kwargs.get("is_causal", op.args[5] if len(op.args) > 5 else False)
    return flop / 2 if causal and not isinstance(causal, Ref) else flop

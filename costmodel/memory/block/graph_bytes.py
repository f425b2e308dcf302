"""What the halves of a compiled block take and give as CUDA graphs: memory that stays, and copies.

    forward    takes inputs, buffers and constants; gives outputs and what is saved
    backward   takes what is saved, and outputs' gradients; gives gradients of inputs and of
               parameters, and of products whose weight gradients are made outside the output's

A result that lies in memory of what a graph takes is not copied. Under selective recomputation less
is saved than is counted here, as without.
"""

from __future__ import annotations

from typing import NamedTuple

from costmodel.memory.saved import HELD_ANYWAY, SavedTensors, saved_tensors
from planner.language.graph import Program
from planner.language.ops.weight_products import deferrable_products


class GraphBytes(NamedTuple):
    """Bytes of both halves."""

    taken: int
    given: int
    taken_back: int
    given_back: int

    @property
    def total(self) -> int:
        """Bytes of all memory that stays."""
        return sum(self)


def graph_bytes(program: Program, saved: SavedTensors | None = None) -> GraphBytes:
    """Return what graphs of a bound program take and give; `saved` is what its ops save, if it is
    at hand.
    """
    saved = saved or saved_tensors(program)
    tensor, storage = program.tensor, saved.storages.storage
    sizes = {name: meta.bytes_at(1) for name, meta in tensor.items()}
    params = {name for name in program.params if tensor[name].kind == "param"}
    outputs = {storage[name].root: sizes[name] for name in program.outputs}
    inner = {root: size for root, size in saved.roots.items() if root not in program.inputs}
    extra = sum(saved.extra.values())
    products = deferrable_products(program)
    made = {weight.name for _, weight, *_ in products.values()}
    others = [n for n in params if tensor[n].requires_grad and n not in made]
    makers = {op.name: op.outputs[0] for op in program.ops}
    arriving = [n for n in program.outputs if tensor[n].requires_grad]
    factors = [makers[name] for name in products if makers[name] not in arriving]
    return GraphBytes(
        taken=sum(sizes[n] for n in (*program.inputs, *program.params) if n not in params),
        given=sum(
            size
            for root, size in (outputs | inner).items()
            if root not in program.inputs and root not in program.params
        )
        + extra,
        taken_back=sum(saved.roots.values()) + extra + sum(sizes[n] for n in arriving),
        given_back=sum(
            sizes[n]
            for n in (*program.inputs, *others, *factors)
            if tensor[n].requires_grad and tensor[n].kind not in HELD_ANYWAY - {"param"}
        ),
    )

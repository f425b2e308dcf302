"""Context parallelism: the layouts of an axis that divides sequences.

Between blocks tensors of [batch, sequence, ...] lie Shard(1); every rank has all weights,
whose gradients are summed over the axis once a step. Inside, work by position stays where
it is, also where tp gathers or scatters its pieces of the sequence (`nested`); attention
gathers keys and values, or whatever the propagation finds cheapest. Side inputs (masks,
rotary tables) and the batch itself are whole, and cut where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import LayoutError
from planner.graph import Affine, Block, ModelGraph, Program
from planner.layout.placement import Shard
from planner.layout.propagate import propagate_graph
from planner.plan import ClassLayout

SEQUENCE_DIM = 1


def propagate_cp(
    graph: ModelGraph, programs: Sequence[Program], *, microbatch_size: int, cp: int
) -> tuple[ClassLayout, ...]:
    """Return a cp layout for every class; `programs` are the classes', bound and lowered on tp.

    Raises LayoutError for a model whose blocks do not hand on sequences, or not of a size
    that divides; it names the block and the tensor.
    """
    check_hands_on_sequences(graph, cp)
    layouts = propagate_graph(
        graph,
        microbatch_size=microbatch_size,
        axis_size=cp,
        boundary=Shard(SEQUENCE_DIM),
        programs=programs,
        sequences_only=True,
    )
    return tuple(layout.model_copy(update={"axis": "cp"}) for layout in layouts)


def check_hands_on_sequences(graph: ModelGraph, cp: int) -> None:
    """Raise LayoutError for a block whose outputs are no sequences that cp divides."""
    for block in graph.blocks:
        _check_block(graph, block, cp)


def longest_sequence(graph: ModelGraph) -> int:
    """Return the positions of the longest sequence that blocks hand on; 0 for none."""
    handed = (graph.tensor[name] for block in graph.blocks for name in block.outputs)
    lengths = (
        t.shape[SEQUENCE_DIM]
        for t in handed
        if t.requires_grad and len(t.shape) == 3 and isinstance(t.shape[0], Affine)
    )
    return max((length for length in lengths if isinstance(length, int)), default=0)


def _check_block(graph: ModelGraph, block: Block, cp: int) -> None:
    trained = [graph.tensor[n] for n in block.outputs if graph.tensor[n].requires_grad]
    handed = [t for t in trained if t.name != graph.loss]
    sequences = [t for t in handed if len(t.shape) == 3 and isinstance(t.shape[0], Affine)]
    if any(not isinstance(t.shape[1], Affine) and t.shape[1] % cp == 0 for t in sequences):
        return
    if not handed:
        return
    worst = (sequences or handed)[0]
    shape = list(worst.shape_at(1))
    why = (
        f"its sequence of {shape[1]} does not divide by {cp}; use a cp that does, or pad it"
        if sequences
        else "it is not [batch, sequence, hidden]; use cp=1 for this model"
    )
    raise LayoutError(
        f"cp={cp} divides sequences, and block {block.name} hands on {worst.name} of shape "
        f"{shape} for one sample: {why}"
    )

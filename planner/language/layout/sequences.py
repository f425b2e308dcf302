"""When an axis may divide sequences: every block must hand on [batch, sequence, hidden].

Between blocks such tensors lie Shard(1). Inside, work by position stays where it is, also where
an inner axis gathers or scatters its pieces of the sequence (`planner.language.ops.nested`);
attention gathers keys and values, or whatever the propagation finds cheapest. Side inputs (masks,
rotary tables) and the batch itself are whole, and cut where they are used.
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.language.graph import Affine, Block, ModelGraph

SEQUENCE_DIM = 1

LEAST_POSITIONS = 8192
"""Of a sequence, left to each rank unless a size is asked for. With 4,096 a search for Llama-3-70B
at 8,192 positions on 64 GPUs takes 43% longer, and finds the same plan."""


def check_hands_on_sequences(graph: ModelGraph, axis: str, size: int) -> None:
    """Raise LayoutError for a block whose outputs are no sequences that `size` ranks divide."""
    for block in graph.blocks:
        _check_block(graph, block, axis, size)


def most_parts(graph: ModelGraph) -> int:
    """Return the largest size of an axis of sequences that a search tries on its own."""
    return longest_sequence(graph) // LEAST_POSITIONS


def longest_sequence(graph: ModelGraph) -> int:
    """Return the positions of the longest sequence that blocks hand on; 0 for none."""
    handed = (graph.tensor[name] for block in graph.blocks for name in block.outputs)
    lengths = (
        t.shape[SEQUENCE_DIM]
        for t in handed
        if t.requires_grad and len(t.shape) == 3 and isinstance(t.shape[0], Affine)
    )
    return max((length for length in lengths if isinstance(length, int)), default=0)


def can_be_filled_up(graph: ModelGraph, length: int) -> bool:
    """Whether sequences of so many positions come with the batch, which may be filled up behind."""
    return any(length in graph.tensor[name].shape for name in graph.batch_inputs)


def _check_block(graph: ModelGraph, block: Block, axis: str, parts: int) -> None:
    trained = [graph.tensor[n] for n in block.outputs if graph.tensor[n].requires_grad]
    handed = [t for t in trained if t.name != graph.loss]
    sequences = [t for t in handed if len(t.shape) == 3 and isinstance(t.shape[0], Affine)]
    cut = [t.shape[SEQUENCE_DIM] for t in sequences]
    if any(not isinstance(length, Affine) and length % parts == 0 for length in cut):
        return
    if not handed:
        return
    worst = (sequences or handed)[0]
    shape = list(worst.shape_at(1))
    if sequences:
        less = shape[1] // parts * parts
        more = less + parts
        lengths = f"{less} or {more}" if less else str(more)
        why = (
            f"its sequence of {shape[1]} does not divide by {parts}; use a {axis} that divides it, "
            f"or sequences of {lengths}"
        )
        if can_be_filled_up(graph, shape[1]):
            why += f": planner.apply(..., pad=) fills shorter ones up to {more}"
    else:
        why = f"it is not [batch, sequence, hidden]; use {axis}=1 for this model"
    raise LayoutError(
        f"{axis}={parts} divides sequences, and block {block.name} hands on {worst.name} of shape "
        f"{shape} for one sample: {why}"
    )

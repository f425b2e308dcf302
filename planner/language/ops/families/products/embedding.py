"""Embedding: by token, by hidden dim, or with the vocabulary divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.graph.tables import TABLE_LOOKUP
from planner.language.layout.placement import OpSharding, Shard
from planner.language.layout.redistribute import EXCHANGED_EMBEDDING
from planner.language.ops.call import Call, LocalForm, P, Placed, R, Work
from planner.language.ops.families.shapes.rows_by_number import taken
from planner.language.ops.flops import arriving_bytes, made_bytes
from planner.language.ops.kernel import KernelCall, Saved, saves_inputs
from planner.language.ops.letters import by_letters
from planner.language.ops.record import Numbers, OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import IN_ORDER, WHOLE, State
from planner.language.ops.samples.step import Across, Step


def embedding_by_vocabulary(call: Call) -> Iterator[OpSharding]:
    """Each rank has a range of rows and makes a term of the sum."""
    if not _depends_on_the_batch(call):
        yield OpSharding(inputs=(Shard(0), R), outputs=(P,))


def embedding(call: Call) -> Iterator[OpSharding]:
    """Weight [vocabulary, hidden], indices […], output […, hidden]."""
    if not _depends_on_the_batch(call):
        yield from _by_token_or_column(call)


def embedding_of_rows(call: Call) -> Iterator[OpSharding]:
    """With a gradient of rows the indices are whole: who adds up rows is the table, not the op."""
    if _has_rows(call):
        yield OpSharding(inputs=(Shard(1), R), outputs=(Shard(len(call.inputs[1])),))


def embedding_apart(call: Call) -> Iterator[OpSharding]:
    """Each index is looked up alone, whatever its table's gradient is."""
    if _has_rows(call):
        yield from _by_token_or_column(call)


def _by_token_or_column(call: Call) -> Iterator[OpSharding]:
    indices = list(range(len(call.inputs[1])))
    yield from by_letters([[None, "h"], indices], [[*indices, "h"]])


def _has_rows(call: Call) -> bool:
    return call.op.target == TABLE_LOOKUP or bool(call.arg(4, "sparse", False))


def embedding_by_exchange(call: Call) -> Iterator[OpSharding]:
    """Each rank has a range of rows and its own samples: they exchange the rows looked up."""
    if not _depends_on_the_batch(call):
        # The indices' dims are the samples' and positions'; any may be a rank's own.
        for dim in range(len(call.inputs[1])):
            yield OpSharding(inputs=(Shard(0), Shard(dim)), outputs=(Shard(dim),))


def _depends_on_the_batch(call: Call) -> bool:
    """Whether gradients are scaled by how often a row is used, or sparse."""
    return bool(call.arg(3, "scale_grad_by_freq", False) or call.arg(4, "sparse", False))


def embedding_on_shard(placed: Placed) -> LocalForm:
    """With the vocabulary divided, a rank looks up its own rows and has zeros elsewhere, or gets
    those of its samples from the ranks that hold them.
    """
    if placed.sharding.inputs[0] != Shard(0):
        return LocalForm((placed.op,))
    padding = placed.call.arg(2, "padding_idx", -1)
    if placed.sharding.inputs[1] != R:
        return placed.with_args(
            *placed.op.args[:2],
            padding,
            placed.axis,
            placed.call.axis_size,
            target=EXCHANGED_EMBEDDING,
        )
    return placed.with_args(
        *placed.op.args[:2], padding, placed.axis, target="planner.vocab_embedding"
    )


def vocab_embedding(call: Call) -> Iterator[OpSharding]:
    """A range of rows [rows, hidden], indices […]: by token; the range is on another axis."""
    tokens = list(range(len(call.inputs[1])))
    yield from by_letters([[None, None], tokens], [[*tokens, None]])


def _gathered_bytes(call: Call) -> float:
    """Reads the rows it gathers and their numbers, not the table."""
    return arriving_bytes(call) + call.num_bytes(call.op.inputs[1])


def _backward(call: Call, forward: Work) -> Work:
    """Adds the gradient of each row to a table of zeros."""
    arriving = arriving_bytes(call)
    return Work(flop=arriving, read_bytes=arriving, write_bytes=made_bytes(call) + arriving)


def _backward_of_rows(call: Call, forward: Work) -> Work:
    """Keeps the gradient of each row that was looked up."""
    arriving = arriving_bytes(call)
    return Work(flop=0, read_bytes=arriving, write_bytes=arriving)


def _numbers_on_the_device(call: KernelCall) -> Saved:
    """Of a table on the host the numbers are there, too."""
    on_host = call.tensor[call.op.inputs[0]].on_host
    return Saved() if on_host else saves_inputs(1)(call)


def _local_rows(call: KernelCall) -> Saved:
    """Indices counted from this rank's first row (int64) and which of them lie elsewhere."""
    return Saved(extra_bytes=9 * call.numel(call.op.inputs[1]))


def _numbers(call: KernelCall) -> Saved:
    """Where each index's row came from, in which place it was, and what others asked (int64)."""
    return Saved(extra_bytes=24 * call.numel(call.op.inputs[1]))


def _rows_on_the_way(call: KernelCall, *, forward: bool) -> int:
    """The rows that a rank sends and those that it gets."""
    width = call.shape(call.op.inputs[0])[1]
    rows = call.numel(call.op.inputs[1])
    return 2 * rows * width * call.element_bytes(call.op.inputs[0])


# ---------------------------------------------------------------------------------------- samples


def _rows_of_the_table(step: Step) -> tuple[State, ...] | None:
    """Table, numbers: its rows may be those of the batch."""
    table, index = step.op.args[:2]
    return taken(step, table, {0: index})


def _bags(step: Step) -> tuple[State, ...] | None:
    """Table, numbers of all bags in a row, where each bag begins: a row for each bag.

    Where bags begin at numbers that come with the batch, a part's numbers are other samples'.
    Gradients that are divided by how often the batch has a row can't be made of parts.
    """
    table, numbers, begins = step.states[:3]
    starts_in_rows = begins.points == IN_ORDER and begins.order == IN_ORDER
    starts_in_rows &= begins.each == step.each(step.op.inputs[1], 0)
    in_parts = table.is_whole and numbers.rows == Shard(0) and not numbers.order and starts_in_rows
    if not in_parts or step.arg(3, "scale_grad_by_freq", False):
        if not any(state.rows for state in step.states):
            return None
        step.blame("mixed")
        return step.anything()
    growing = [step.growing(name) for name in step.op.outputs]
    return tuple(State(rows=Shard(dims[0])) if dims else WHOLE for dims in growing)


def _rows_by_number(call: Call, name: str) -> Numbers:
    """Rows of the table."""
    return Numbers("any", call.inputs[0][0])


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="embedding",
        targets=aten("embedding"),
        numbers=_rows_by_number,
        shard=(
            ShardRule(embedding_by_vocabulary, contiguous=True, together=True),
            ShardRule(embedding_by_exchange, contiguous=True, together=True),
            ShardRule(embedding),
            ShardRule(embedding_of_rows),
            ShardRule(embedding_apart, offered=False),
        ),
        local_form=embedding_on_shard,
        worth_moving=True,
        backward=_backward,
        reads=_gathered_bytes,
        saved=saves_inputs(1),
        across=Across(handlers=(_rows_of_the_table,)),
    )
)
register(
    OpFamily(
        name="sums of rows",
        targets=aten("embedding_bag _embedding_bag"),
        across=Across(handlers=(_bags,)),
    )
)
register(
    OpFamily(
        name="embedding whose gradient is rows",
        targets=(TABLE_LOOKUP,),
        numbers=_rows_by_number,
        shard=(ShardRule(embedding_of_rows), ShardRule(embedding_apart, offered=False)),
        backward=_backward_of_rows,
        reads=_gathered_bytes,
        saved=_numbers_on_the_device,
        recomputed=False,  # rows may come from the host
        eager="the gradient of its table is of rows",
    )
)
register(
    OpFamily(
        name="embedding with a shard of the vocabulary",
        targets=("planner.vocab_embedding",),
        shard=(ShardRule(vocab_embedding),),
        saved=_local_rows,
    )
)
register(
    OpFamily(
        name="embedding whose ranks exchange rows",
        targets=(EXCHANGED_EMBEDDING,),
        shard=(ShardRule(vocab_embedding),),
        reads=_gathered_bytes,
        backward=_backward,
        saved=_numbers,
        scratch=_rows_on_the_way,
        recomputed=False,  # other ranks would have to take part
        eager="which rows ranks exchange follows from the batch",
    )
)

"""A program on a whole batch in two halves: of each part of it, and of what the parts gave.

The first ends in sums over samples, which add up, and in rows that meet those of other parts, which
lie one behind the other; the second begins with these. Most of what a loss takes of a batch begins
with a count, so that ranks tell each other some numbers and not their samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.language.across.follow import follow_program
from planner.language.graph import Program, Unit
from planner.language.ops.samples.state import (
    ADDED,
    CONSTANT,
    IN_ORDER,
    SAMPLES,
    State,
    growing_dims,
    lies,
)
from planner.language.ops.samples.step import Walk


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The halves of a program.

    Attributes:
        first: of a part of the batch; its outputs are `sums` and `rows`.
        second: of the whole batch; its inputs are these.
        sums: outputs that are sums over samples (`ADDED`), or means (`SAMPLES`).
        rows: outputs that have samples along a dim, with this dim.
        same: outputs that every part has: numbers of the batch.
    """

    first: Program
    second: Program
    sums: dict[str, str]
    rows: dict[str, int]
    same: tuple[str, ...]


def halves(program: Program, unit: Unit) -> Halves:
    """Cut a program of the batch, of buffers and constants in two."""
    states: dict[str, State] = dict.fromkeys(program.params, CONSTANT)
    for name in program.inputs:
        states[name] = State(rows=lies(program.tensor[name], unit), pure=True)
    walk = Walk(program=program, states=states, unit=unit)
    follow_program(walk)
    behind = {
        op.name
        for op in program.ops
        if any(walk.states[name].loose for name in op.outputs) or not op.inputs
    }
    # What no sample changes is made anew, of what it is made of.
    while True:
        made = {name for op in program.ops if op.name in behind for name in op.outputs}
        wanted = {name for op in program.ops if op.name in behind for name in op.inputs}
        more = {
            op.name
            for op in program.ops
            if op.name not in behind
            and (wanted | set(program.outputs)).intersection(op.outputs)
            and not all(_is_told(walk, name) for name in op.outputs)
        }
        if not more:
            break
        behind |= more
    ends = [n for n in dict.fromkeys((*sorted(wanted), *program.outputs)) if n not in made]
    told = [name for name in ends if _is_told(walk, name)]
    sums = {name: walk.states[name].share for name in told if walk.states[name].sums}
    same = tuple(n for n in program.inputs if n in ends and not growing_dims(program.tensor[n]))
    rows = {n: growing_dims(program.tensor[n])[0] for n in told if n not in sums}
    told += same
    second = Program(
        name=program.name,
        inputs=tuple(told),
        params=tuple(n for n in program.params if n in wanted | set(program.outputs)),
        outputs=program.outputs,
        tensors=program.tensors,
        ops=tuple(op for op in program.ops if op.name in behind),
    )
    kept = {*second.inputs, *second.params, *made}
    second = replace(second, tensors=tuple(t for t in program.tensors if t.name in kept))
    return Halves(first=program.only(tuple(told)), second=second, sums=sums, rows=rows, same=same)


def _is_told(walk: Walk, name: str) -> bool:
    """Whether parts give a tensor: a sum over samples, or their rows in the order of samples."""
    state, tensor = walk.states[name], walk.program.tensor[name]
    if state.loose or name in walk.program.params:
        return False
    if state.sums:
        return state.share in (ADDED, SAMPLES)
    in_order = state.rows is not None and (state.order, state.points) == (IN_ORDER, None)
    return len(growing_dims(tensor)) == 1 and in_order and state.rows == lies(tensor, walk.unit)

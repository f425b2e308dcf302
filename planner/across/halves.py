"""A program on a whole batch in two halves: of each part of it, and of what the parts gave.

The first ends in sums over samples, which add up, and in rows that meet those of other parts, which
lie one behind the other; the second begins with these. Most of what a loss takes of a batch begins
with a count, so that ranks tell each other some numbers and not their samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.across.follow import follow_program
from planner.across.state import ADDED, CONSTANT, IN_ORDER, SAMPLES, State
from planner.across.step import Walk
from planner.graph import Affine, Program, Unit
from planner.layout.placement import Shard


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
        lies = _lies(program, name, unit)
        states[name] = CONSTANT if lies is None else State(rows=lies, pure=True)
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
    same = tuple(n for n in program.inputs if n in ends and not _growing(program, n))
    rows = {name: _growing(program, name)[0] for name in told if name not in sums}
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
    state, program = walk.states[name], walk.program
    if state.loose or name in program.params:
        return False
    if state.sums:
        return state.share in (ADDED, SAMPLES)
    growing = _growing(program, name)
    in_order = state.rows is not None and (state.order, state.points) == (IN_ORDER, None)
    return len(growing) == 1 and in_order and state.rows == _lies(program, name, walk.unit)


def _lies(program: Program, name: str, unit: Unit) -> Shard | None:
    """Return where a tensor has its samples, as one of the batch has them."""
    growing = _growing(program, name)
    size = program.tensor[name].shape[growing[0]] if growing else 0
    return Shard(growing[0], unit.runs_of(size.per_sample)) if isinstance(size, Affine) else None


def _growing(program: Program, name: str) -> list[int]:
    shape = program.tensor[name].shape
    return [d for d, size in enumerate(shape) if isinstance(size, Affine) and size.per_sample]

"""What bringing a value from one placement to another takes, beside the value itself."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.memory.exact.stage.placed_block import Copy
from costmodel.memory.ops.kernel_scratch import staging_bytes
from costmodel.memory.ops.storage import is_view_slice
from planner.layout.placement import Placement, Replicate, Shard
from planner.runtime.step.wiring import Placements


def copy_between(
    lies: Placements,
    taken: Placements,
    num_bytes: int,
    shape: Sequence[int],
    *,
    tp: int,
    cp: int,
) -> Copy | None:
    """Return what bringing a value of some whole shape from one placement to another takes,
    None where nothing moves; `num_bytes` are those of the copy.
    """
    whole = num_bytes * _parts(taken, tp, cp)
    making = returning = 0
    passes_on = True
    start = num_bytes
    moves = _moves(lies, taken, tp=tp, cp=cp)
    for before, after, src, dst in moves:
        source, target = whole // _parts(before, tp, cp), whole // _parts(after, tp, cp)
        held = 0 if before == lies else source
        size = max(source, target)
        making = max(making, held + target + staging_bytes(src, dst, size, forward=True))
        if isinstance(src, Shard) or isinstance(dst, Shard):
            passes_on = False
            staged = staging_bytes(src, dst, size, forward=False)
            returning = max(returning, target + source + staged - start)
    if len(moves) == 1 and is_view_slice(moves[0][2], moves[0][3], shape):
        return Copy(0, 0, returning, passes_on, is_view=True)
    return Copy(num_bytes, making, returning, passes_on) if moves else None


def _moves(
    lies: Placements, taken: Placements, *, tp: int, cp: int
) -> list[tuple[Placements, Placements, Placement, Placement]]:
    """The redistributions between two placements, as `planner.runtime.stage.stage` makes them:
    placements before and after each, and on the axis that it is on.
    """
    between: Placement = lies.cp
    ways: list[tuple[Placements, Placements, Placement, Placement]] = []
    if tp > 1 and lies.tp != taken.tp:
        if _cut_one_dim(lies.tp, lies.cp) or _cut_one_dim(taken.tp, lies.cp):
            between = Replicate()
            ways.append((lies, Placements(lies.tp, between), lies.cp, between))
        at = Placements(lies.tp, between)
        ways.append((at, Placements(taken.tp, between), lies.tp, taken.tp))
    if cp > 1 and between != taken.cp:
        ways.append((Placements(taken.tp, between), taken, between, taken.cp))
    return ways


def _cut_one_dim(a: Placement, b: Placement) -> bool:
    return isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim


def _parts(placed: Placements, tp: int, cp: int) -> int:
    return (tp if isinstance(placed.tp, Shard) else 1) * (cp if isinstance(placed.cp, Shard) else 1)

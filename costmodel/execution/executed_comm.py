"""Collectives of a block as a runtime runs it: what of them compute hides, and waits at them.

Rows of experts go to their ranks and back, in the forward and in the backward, by a dispatcher
(`costmodel.execution.dispatch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.execution.dispatch.beside import shown_rows_s
from costmodel.execution.dispatch.exchange import exchange_bytes, exchange_seconds
from costmodel.execution.executed import ExecutedProfile, KernelSeconds
from costmodel.time.block.compute import (
    bytes_of,
    inner_axis,
    inner_bytes,
    inner_seconds,
    redistribution,
)
from costmodel.time.block.moved import Moved, shown_s
from costmodel.topology import Axis
from planner.language.graph import Program
from planner.language.layout.redistribute import (
    DEAL_RUNS,
    EXCHANGE_ROWS,
    GATHER_SAMPLES,
    REDISTRIBUTE,
    goes_back,
)
from planner.language.ops.families.products.rings import RING


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedComm:
    """A block's collectives, and what shows of them."""

    forward: tuple[Moved, ...]
    """Those of the forward."""
    backward: tuple[Moved, ...]
    """Those of the backward."""
    skew_s: float
    """Waits for the last rank and for the network's threads, in each of both."""
    rows_s: float
    """Seconds that show in the forward of what sends rows to their experts and back."""
    rows_back_s: float
    """Seconds that show in the backward of what sends their gradients."""
    kernels: int
    """Collectives of the forward."""
    size: int
    """Ranks of the largest group."""

    @property
    def forward_s(self) -> float:
        """Seconds that show of the forward's."""
        return shown_s(self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds that show of the backward's."""
        return shown_s(self.backward)


def exposed_comm(
    local: Program,
    profile: ExecutedProfile,
    axes: Mapping[str, Axis],
    compute: KernelSeconds,
    attention: KernelSeconds,
    shared: KernelSeconds,
) -> ExposedComm:
    """Return the collectives of a bound program as far as compute does not hide them.

    `compute` is of all its kernels, `attention` of those of attention, `shared` of the experts that
    every token goes through.
    """
    execution = profile.execution
    # Beside half of a block; beside attention; of experts' rows.
    there: list[Moved] = []
    back: list[Moved] = []
    ring: list[Moved] = []
    ring_back: list[Moved] = []
    rows: list[Moved] = []
    rows_back: list[Moved] = []
    count = exchanges = 0
    sums = 0
    size = nodes = 1

    def moved(axis: str, num_bytes: float, seconds: float) -> list[Moved]:
        return [Moved(axis, 1, num_bytes, seconds, seconds)] if seconds else []

    for op in local.ops:
        if op.target == RING:
            # Rounds of a part each move what an all-gather of that much moves.
            num_bytes = len(op.args[11]) * bytes_of(local, op.inputs[1:3])  # type: ignore[arg-type]
            axis = str(op.args[13])
            round_s, grads_s = (
                profile.collective_seconds(kind, num_bytes, axes[axis].group).seconds
                for kind in ("all_gather", "reduce_scatter")
            )
            ring += moved(axis, num_bytes, round_s)
            # The backward sees the keys and values of all ranks again, and sends gradients.
            ring_back += moved(axis, 2 * num_bytes, round_s + grads_s)
            continue
        if op.target == DEAL_RUNS:  # a part of the exchange's own cost
            continue
        if op.target == EXCHANGE_ROWS:
            seconds = exchange_seconds(op, local, profile, axes["ep"], profile.dispatcher)
            sizes = exchange_bytes(op, local, axes["ep"], profile.dispatcher)
            for sent, sent_bytes, sent_s in zip((rows, rows_back), sizes, seconds, strict=True):
                sent += moved("ep", sent_bytes, sent_s)
            exchanges += 1
            continue
        if op.target != REDISTRIBUTE:
            if op.target.startswith("planner."):
                inner = inner_seconds(op, local.tensor, profile, axes)
                found = (
                    moved(inner_axis(op, axes), inner_bytes(op, local.tensor), sum(inner))
                    if inner
                    else []
                )
                is_back = goes_back(op, local.tensor)
                if op.target == GATHER_SAMPLES or not is_back:
                    there += found
                    back += found if is_back else []
                else:
                    rows += found
                    rows_back += found
            continue
        if local.tensor[op.inputs[0]].kind == "param":
            # Gradients of parameters that all ranks have are summed once a step, with the others.
            continue
        forward_s, backward_s, moved_bytes = redistribution(op, local.tensor, profile, axes)
        name = str(op.args[1])
        there += moved(name, moved_bytes, forward_s)
        back += moved(name, moved_bytes, backward_s)
        count += forward_s > 0
        # (Ranks tell each other numbers of rows as they sum terms.)
        sums += forward_s > 0 and str(op.args[2])[0] in "PO" and op.args[3] == "R"
        size = max(size, axes[name].size)
        nodes = max(nodes, axes[name].group.num_nodes)
    if count > 1:  # A lone one has nothing beside it.
        # A convention of the model: half of the block's forward runs beside them, either way.
        half_s = 0.5 * compute.forward_s
        there, back = (
            _shown(each, profile.shown_seconds("tp", shown_s(each), behind_s=half_s))
            for each in (there, back)
        )
    # Keys and values go round a ring beside the attention to those at hand.
    ring, ring_back = (
        _shown(each, profile.rates.exposed_seconds(shown_s(each), behind_s=attention_s))
        for each, attention_s in (
            (ring, attention.forward_s),
            (ring_back, attention.backward_s),
        )
    )
    # Each call keeps the host, which issues what would run beside it.
    calls_s = exchanges * profile.dispatcher.call_s
    rows, rows_back = (
        _shown(
            each,
            shown_rows_s(profile, shown_s(each), shared_s=shared_s, compute=compute),
            calls_s=calls_s,
        )
        for each, shared_s in ((rows, shared.forward_s), (rows_back, shared.backward_s))
    )
    # Experts have nothing to do before their rows are there; gradients go the same ways, back.
    return ExposedComm(
        forward=(*there, *ring, *rows),
        backward=(*back, *ring_back, *rows_back),
        skew_s=sums * profile.skew_seconds(size) + count * execution.crossing_late_s * (nodes - 1),
        rows_s=shown_s(rows),
        rows_back_s=shown_s(rows_back),
        kernels=count,
        size=size,
    )


def _shown(moved: list[Moved], seconds: float, *, calls_s: float = 0.0) -> list[Moved]:
    """Return collectives of which so many seconds show in all, each its part; the host's calls come
    on top of what they take.
    """
    whole = shown_s(moved)
    if not whole:
        return moved
    return [
        each._replace(
            seconds=each.seconds + calls_s * each.shown_s / whole,
            shown_s=(seconds + calls_s) * each.shown_s / whole,
        )
        for each in moved
    ]

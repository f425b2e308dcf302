"""The problem of cutting a chain of blocks into stages, and its answer.

What stages cost comes from `Stages`, run by run; which of it makes a step long is in
`chain_paths`, and `chain_dp` and others solve it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.language.schedule.job_order import JobOrder
from search.bounds.copied_jobs import CopiedRow
from search.partition.chain_windows import Indices, Part, Window
from search.stages.partial_recompute import PartialRecompute

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class CostWindow(Protocol):
    """The costs of a window's runs, in its shape; of those that are not valid, anything.

    `forward_s` has a leading axis for the choice; `tail_s` may have one.
    """

    @property
    def forward_s(self) -> Floats:
        """Forward seconds."""
        ...

    @property
    def tail_s(self) -> Floats:
        """Seconds after the last job."""
        ...

    @property
    def copies_s(self) -> tuple[Floats, Floats]:
        """Seconds, by choice, in which a microbatch's activations leave a device and return."""
        ...

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """Least bytes of a rank that holds each run with this many microbatches in flight;
        infinite for choices that depend on what fits.
        """
        ...

    def on_rank(self, rank: RankLimit, part: Part) -> tuple[Floats, Flags]:
        """Return the backward seconds of the runs of a part on a rank, by choice, and whether each
        may fit: False is certain.
        """
        ...

    def until(self, rank: RankLimit, choice: int, part: Part) -> Indices:
        """Return up to which block runs recompute more under a choice; 0 where that does not
        depend on the block.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """The limits of a rank."""

    in_flight: int
    """Microbatches of which it holds at once all that their forwards keep, at least."""
    limit_bytes: float
    """Bytes that its device may take."""
    late_weights: int = 0
    """Microbatches whose weight gradients are all to be made after its last input gradient."""
    infeasible: tuple[InfeasibleStage, ...] = ()
    """Runs of its stage that were found not to fit."""


class Stages(Protocol):
    """What a chain of blocks costs, cut anyhow."""

    @property
    def num_blocks(self) -> int:
        """Length of the chain."""
        ...

    def cost_window(self, window: Window) -> CostWindow:
        """Return the costs of every run of a window."""
        ...

    def costs_of(self, start: Indices, end: Indices) -> CostWindow:
        """Return the costs of these runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibleStage:
    """Blocks that do not fit a stage under a choice: the cost model said so."""

    stage: int
    """The stage."""
    first: int
    """Its first block."""
    end: int
    """The block after its last."""
    choice: int
    """The recompute choice, as an index."""
    and_longer: bool = False
    """Whether no longer run that holds these blocks fits either."""
    until: int | None = None
    """Under a choice that recomputes the first blocks more: the blocks fit only if those up to this
    one do. None: in no case."""
    repeats: tuple[int, int, int] = (0, 0, 1)
    """(first, last, period) of where the chain repeats itself: blocks in it stand for their copies
    whole periods away, which need as much."""

    def holds(self, start: Any, end: Any) -> Any:
        """Whether runs, from `start` to `end` (arrays, broadcast), are these blocks or a copy of
        them; with `and_longer` also those that hold such blocks.
        """
        # Of all copies the last that ends in the run starts latest: a run with any copy holds that.
        shift = self.shift(end)
        first, last = self.first + shift, self.end + shift
        if self.and_longer:
            return (start <= first) & (end >= last)
        return (start == first) & (end == last)

    def shift(self, end: Any) -> Any:
        """Return how far behind the blocks their last copy is before the ends of runs."""
        first, last, period = self.repeats
        # Blocks that stick out of the repetition have no copies.
        if self.first < first or self.end > last:
            return 0
        # Whole periods forward or, if negative, back; a copy from before the repetition is none.
        shift = (np.minimum(end, last) - self.end) // period * period
        return np.where(self.first + shift >= first, shift, 0)

    def is_in(self, cut: Cut) -> bool:
        """Whether a cut has such a stage."""
        if cut.choices[self.stage] != self.choice:
            return False
        start, end = cut.cuts[self.stage : self.stage + 2]
        # Recomputed up to that block or further, the stage is not what was found too large.
        is_more = self.until is not None and cut.until[self.stage] >= self.until + self.shift(end)
        return not is_more and bool(self.holds(start, end))


Line = tuple[float, float, float]
"""(live, slope, room): a run fits only if live * kept bytes + slope * param bytes <= room."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastNeeds:
    """What any run of blocks takes at least, as differences of running sums (n + 1) of blocks."""

    backward_s: tuple[list[float], ...]
    """Backward seconds of a microbatch, for each choice of whole stages."""
    kept_bytes: tuple[list[float], ...]
    """Bytes that a microbatch saves for its backward, for each of them."""
    param_bytes: list[float]
    """Bytes of parameters."""
    lines: Callable[[int], tuple[Line, ...]]
    """From the microbatches that a rank has in flight to what a run must stay below."""
    bare_backward_s: list[float] = field(default_factory=list)
    """Backward seconds of a microbatch, nothing recomputed."""
    partial: tuple[PartialRecompute, ...] = ()
    """The choices that recompute the first blocks more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageView:
    """A chain as a stage sees it, where stages lie on different devices. Seconds, along the chain
    (n + 1).
    """

    before_f: Floats
    """Least forward of the blocks before each cut, on the devices of the stages before."""
    before_b: Floats
    """Least backward of them."""
    after: Floats
    """Least forward and backward of the blocks after each cut, on those of the stages after."""
    transfer_s: Floats
    """The transfer into the stage, if it starts at each block."""
    back_transfer_s: Floats
    """Its gradient's way back."""
    earlier_transfers_s: tuple[float, float]
    """The least of all transfers into the stages before it, there and back."""
    later_transfers_s: tuple[float, float]
    """The least of all those after the next stage, there and back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainProblem:
    """One configuration's chain of n blocks, to be cut into S stages."""

    stages: Stages
    """What runs of blocks cost."""
    block_forward_s: Floats
    """(n) Least forward seconds of each block, whatever the recompute choice."""
    block_backward_s: Floats
    """(n) Least backward seconds of each block."""
    block_weight_s: Floats
    """(n) Most seconds of each block's backward that may come after its gradient is sent on; where
    backward is split its weight gradients, which always may."""
    transfer_s: Floats
    """(n + 1) Seconds to send what a stage starting at block i receives; 0 at i = 0."""
    back_transfer_s: Floats
    """(n + 1) Seconds of its gradient's way back."""
    in_flight: tuple[int, ...]
    """(S) Microbatches of which each stage holds at once all that their forwards keep, at least."""
    num_microbatches: int
    """Microbatches of a step."""
    memory_limit_bytes: float
    """What each rank may hold."""
    order: JobOrder = field(default_factory=JobOrder)
    """What the schedule states of its order of jobs."""
    start_s: float = 0.0
    """Seconds of what is loaded before the first job."""
    choices: tuple[str, ...] = ("none",)
    """Recompute choices, each of which any stage may take; with several meshes those of the first
    mesh, then of the second, and so on."""
    num_meshes: int = 1
    """How many meshes a stage may choose from."""
    needs: LeastNeeds | None = None
    """What any run takes at least; None: not known."""
    cuts: tuple[int, ...] = ()
    """Fixed stage boundaries, so that recompute alone is chosen; empty: free."""
    starts: tuple[int, ...] = ()
    """Blocks that stages may begin with; empty: any."""
    infeasible: tuple[InfeasibleStage, ...] = ()
    """Stages found not to fit, beside what `CostWindow.on_rank` rules out."""
    copied: tuple[CopiedRow, ...] = ()
    """(S) Each stage's jobs beside which activations are copied; empty: none."""
    stage_choices: tuple[tuple[int, ...], ...] = ()
    """(S) What each stage may choose; empty: all may choose all. Where tails differ by choice,
    those of stage 0 share one."""
    views: tuple[StageView, ...] = ()
    """(S) What each stage is near to, where that differs by stage; empty: it does not."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.stages.num_blocks

    @property
    def num_stages(self) -> int:
        """Number of stages to cut."""
        return len(self.in_flight)

    @cached_property
    def least_recompute(self) -> dict[tuple[int, int, int], tuple[int, int] | None]:
        """The fastest choices found so far, with where they stop to recompute more, by stage and
        its run; None where nothing fits (`least_recompute`).
        """
        return {}

    @cached_property
    def may_cut(self) -> Flags:
        """Whether a stage may end, and the next begin, before each block (n + 1)."""
        flags: Flags = np.ones(self.num_blocks + 1, dtype=bool)
        if self.starts:
            flags[:-1] = False
            flags[[*self.starts]] = True
        return flags

    @property
    def longest(self) -> int:
        """The most blocks a stage can hold."""
        return self.num_blocks - self.num_stages + 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are jobs of their own."""
        return self.order.splits_backward

    def limit_of(self, stage: int) -> RankLimit:
        """Return the limits of a stage's rank."""
        stated = self.order.late_weights
        return RankLimit(
            in_flight=self.in_flight[stage],
            limit_bytes=self.memory_limit_bytes,
            late_weights=stated[stage] if stated else 0,
            infeasible=tuple(known for known in self.infeasible if known.stage == stage),
        )

    def late_weights(self, stage: int) -> int:
        """Return of how many microbatches, beside the last, a stage may make weight gradients after
        its last gradient has left.
        """
        if not self.splits_backward:
            return 0
        # Less the last microbatch, whose weight gradients a path leaves out by `before_w`.
        stated = self.order.late_weights
        return (stated[stage] if stated else self.num_microbatches) - 1

    @cached_property
    def before_f(self) -> Floats:
        """Least forward seconds of the blocks before each cut."""
        return np.concatenate([[0.0], np.cumsum(self.block_forward_s)])

    @cached_property
    def before_b(self) -> Floats:
        """Least backward seconds of the blocks before each cut."""
        return np.concatenate([[0.0], np.cumsum(self.block_backward_s)])

    @cached_property
    def before_w(self) -> Floats:
        """Most seconds of the blocks before each cut that may come after gradients are sent."""
        return np.concatenate([[0.0], np.cumsum(self.block_weight_s)])

    @cached_property
    def most_sent_ahead(self) -> float:
        """The most that a stage but stage 0 defers in any but its last backward."""
        # In other backwards than the last a stage defers those of its first block alone. Block 0 is
        # out: stage 0 has it, and sends its gradient to no other stage.
        return float(self.block_weight_s[1:].max(initial=0.0))

    @property
    def first_weight_s(self) -> Floats:
        """What of `before_w` a path's `back` leaves to stage 0's tail, by where stage 0 ends: where
        it is not stated how many weight gradients come last, `back` is without any.
        """
        is_stated = not self.splits_backward or bool(self.order.late_weights)
        return self.before_w if is_stated else 0 * self.before_w

    @cached_property
    def after(self) -> Floats:
        """Least seconds, both directions, of the blocks after each cut."""
        return self.before_f[-1] - self.before_f + self.before_b[-1] - self.before_b

    @cached_property
    def least_transfer(self) -> float:
        """Seconds of the cheapest transfer anywhere inside the chain."""
        # 0 and n are the ends of the chain: nothing is sent there.
        return float(self.transfer_s[1:-1].min()) if self.num_blocks > 1 else 0.0

    @cached_property
    def least_back_transfer(self) -> float:
        """Seconds of the cheapest transfer of a gradient anywhere inside the chain."""
        return float(self.back_transfer_s[1:-1].min()) if self.num_blocks > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A solved chain: stage s holds blocks cuts[s] .. cuts[s+1]-1 with choice index choices[s].

    `value` is the bound of the step time (or, from `smallest_peak`, the peak bytes). `until`: of
    stages whose first blocks recompute more, the block up to which they do, for others 0; empty
    before that is settled.
    """

    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    value: float
    until: tuple[int, ...] = ()

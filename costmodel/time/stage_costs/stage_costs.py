"""StageCosts: what runs of blocks cost as stages of a pipeline, an array entry for each run.

With F, B the seconds of a run's forward and backward (`times`), R what recomputation adds, W the
part of B that makes weight gradients, and E what its exchange with replicas exposes beside its
compute (`costmodel.time.communication`), one microbatch takes

    forward job   F + E.forward
    backward job  B + E.backward + R

A backward split in two (zero-bubble schedules) takes B - W + E.backward + R for the input's
gradient, which the stage before waits for, and W for the weights'. ZeRO reduces gradients as a
block's backward ends, so with ZeRO nothing is left for the second job. Once a step come E.once
and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from costmodel.execution import Execution
from costmodel.execution.executed import waited_for_host
from costmodel.time.communication import DataParallelSeconds, message_pieces
from costmodel.time.stage_costs.chain import ChainCosts
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.replicas import Counted, ReplicaPrices, replica_prices
from costmodel.time.stage_costs.runs import Flags, Floats, Indices
from costmodel.time.stage_costs.times import RecomputeTimes, RunTimes
from planner.language.plan import Recompute
from planner.language.plan.replication import Replication
from planner.language.schedule.timing.job_seconds import JobSeconds
from profiles import Group


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRuns:
    """Runs start .. end-1 of a chain, before anything is said about replicas."""

    chain: ChainCosts
    start: Indices
    end: Indices

    @cached_property
    def times(self) -> RunTimes:
        """Seconds of one microbatch."""
        return self.chain.run_times(self.start, self.end)

    def recomputation(self, by_block: Sequence[Recompute]) -> RecomputeTimes:
        """Return what recomputation adds to a backward; a choice for each block of the chain."""
        of_blocks = self.chain.times.recomputation(by_block)
        return RecomputeTimes(
            **{f.name: self._sums(getattr(of_blocks, f.name)) for f in fields(of_blocks)}
        )

    def recomputes(self, by_block: Sequence[Recompute]) -> Flags:
        """Return whether each run has a block that recomputes anything."""
        return self._sums(np.array([choice != "none" for choice in by_block], dtype=float)) > 0

    def _sums(self, of_blocks: Floats) -> Floats:
        """Return each run's sum of an amount of blocks."""
        sums = np.append(0.0, np.cumsum(of_blocks))
        return sums[self.end] - sums[self.start]

    @cached_property
    def load(self) -> StageLoad:
        """Bytes."""
        return self.chain.loads.loads(self.start, self.end)

    @cached_property
    def num_blocks(self) -> Floats:
        """Number of blocks."""
        return (self.end - self.start).astype(float)

    @cached_property
    def params(self) -> tuple[Floats, Floats]:
        """Bytes and number of trainable parameters."""
        return self.chain.loads.params(self.start, self.end)

    def kept(self, by_block: Sequence[Recompute]) -> Floats:
        """Return what blocks of each run save of a microbatch, shared side inputs apart; a choice
        for each block of the chain.
        """
        return self.chain.kept(self.start, self.end, by_block)

    def receive_s(self, pp_group: Group, *, to_tp: int | None = None) -> tuple[Floats, Floats]:
        """Return the transfers into each run, and of its gradient back to a stage of `to_tp`."""
        return self.chain.messages.run_transfer_s(self.start, self.end, pp_group, to_tp=to_tp)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """The costs of runs of blocks as stages whose ranks are replicated so."""

    runs: BlockRuns
    replication: Replication

    @property
    def times(self) -> RunTimes:
        """Seconds of one microbatch, nothing exchanged with replicas."""
        return self.runs.times

    @cached_property
    def prices(self) -> ReplicaPrices:
        """Prices of exchange and update."""
        chain = self.runs.chain
        return replica_prices(chain.costs, self.replication, chain.split.degrees)

    @cached_property
    def _held(self) -> tuple[tuple[Floats, ...], dict[str, Any]]:
        """What runs' exchange with replicas depends on (`ReplicaPrices.of_stages`)."""
        runs = self.runs
        more: dict[str, Any] = {}
        if self.replication.zero_stage == 3:
            # ZeRO 3 alone gathers frozen parameters.
            more["frozen"] = runs.chain.loads.frozen(runs.start, runs.end)[1:]
        if self.replication.expert_replicas is not None:
            more["spread"] = runs.chain.loads.spread(runs.start, runs.end)
        elif self.prices.gathers_narrow:
            more["narrow"] = runs.chain.loads.narrow(runs.start, runs.end)
        param_bytes, num_params = runs.params
        return (param_bytes, runs.num_blocks, num_params), more

    @cached_property
    def _replicas(self) -> tuple[DataParallelSeconds, Floats]:
        held, more = self._held
        return self.prices.of_stages(*held, **more)

    @property
    def exchange(self) -> DataParallelSeconds:
        """What is exchanged with replicas, nothing hidden."""
        return self._replicas[0]

    def exchanged(self, what: Counted) -> DataParallelSeconds:
        """Return how many bytes, or messages, each part of that exchange has, in its place."""
        held, more = self._held
        return self.prices.counted(what).of_stages(*held, **more)[0]

    @cached_property
    def updated(self) -> tuple[Floats, ...]:
        """Bytes and number of trainable parameters; then those of experts, where these lie on a
        mesh of their own.
        """
        runs = self.runs
        if self.replication.expert_replicas is None:
            return runs.params
        return (*runs.params, *runs.chain.loads.spread(runs.start, runs.end))

    @property
    def update_s(self) -> Floats:
        """Seconds of clipping and the optimizer, of a rank that has no other stage."""
        return self._replicas[1]

    @cached_property
    def exposed(self) -> DataParallelSeconds:
        """What the exchange with replicas adds to the compute beside which it runs."""
        return self._replicas[0].hidden_behind(
            self.runs.chain.costs.profile,
            forward_s=self.times.whole_forward_s,
            backward_s=self.times.whole_backward_s,
            num_pieces=message_pieces(self.runs.chain.costs.execution, self.runs.num_blocks),
        )

    @cached_property
    def job_host_s(self) -> tuple[Floats, Floats]:
        """Seconds in which the device waits for what the host does about a job beside its blocks,
        in a forward and in a backward.
        """
        times = self.times
        issued_s = self.runs.chain.costs.job_issue_s
        return (
            waited_for_host(issued_s, times.whole_forward_s, times.host_forward_s),
            waited_for_host(issued_s, times.whole_backward_s, times.host_backward_s),
        )

    @cached_property
    def forward_s(self) -> Floats:
        """Seconds of a forward job."""
        return self.times.whole_forward_s + self.exposed.forward_s + self.job_host_s[0]

    @cached_property
    def bare_backward_s(self) -> Floats:
        """Seconds of a full backward job without recomputation."""
        return self.times.whole_backward_s + self.exposed.backward_s + self.job_host_s[1]

    def backward_s(self, recompute: Recompute | Sequence[Recompute]) -> Floats:
        """Return the seconds of a full backward job; a choice for all blocks of the chain or for
        each.
        """
        if isinstance(recompute, str):
            return self.bare_backward_s + self.times.recompute_s(recompute)
        return self.bare_backward_s + self.runs.recomputation(recompute).whole_s

    @property
    def weight_s(self) -> Floats:
        """Seconds of the backward that a job of its own can make."""
        # FSDP2 reduces a block's gradients as its backward ends, so none can be put off.
        seconds: Floats = self.times.weight_s * (not self.replication.is_sharded)
        return seconds

    @property
    def first_weight_s(self) -> Floats:
        """`weight_s` of each run's first block."""
        first_s: Floats = self.runs.chain.times.weight_s[self.runs.start]
        return first_s * (not self.replication.is_sharded)

    @property
    def after_s(self) -> Floats:
        """Seconds of exchange that come once a step, whatever the number of microbatches."""
        return self.exposed.once_s

    def job_seconds(
        self,
        recompute: Sequence[Recompute],
        *,
        receive_s: tuple[Floats, Floats],
        recompute_last: Sequence[bool] | None = None,
    ) -> JobSeconds:
        """Return the jobs of a pipeline whose stages are these runs in order.

        `recompute` is what each block of the chain recomputes. `receive_s` are the transfers into
        each stage and of its gradient back from it; `recompute_last` says whether the step's last
        microbatch is recomputed, too.

        A full backward sends its input's gradient ahead of deferred weight gradients: those of
        the stage's first block, in the step's last backward all of them
        (`planner.runtime.step.executor`). Stages with recomputed blocks make theirs at once. A
        runtime that does not send ahead ends the backward first.
        """
        execution = self.runs.chain.costs.execution
        (there, back), (there_wait_s, back_wait_s) = transfers(execution, receive_s)
        recomputed_s = self.runs.recomputation(recompute).whole_s
        weight_s = self.weight_s
        # Up to the input's gradient, nothing recomputed. What is exposed of the exchange lies here:
        # the job of the weight gradients has none.
        alone_s = self.bare_backward_s - weight_s + back_wait_s
        forward_s = self.forward_s + there_wait_s
        input_s = alone_s + recomputed_s
        # What is recomputed lives for a block; deferred, it would live for the stage.
        defers = ~self.runs.recomputes(recompute) & execution.sends_ahead
        last_s = None
        # Only a stage that recomputes, but not its last microbatch, has another last backward.
        if recompute_last is not None and not (defers | recompute_last).all():
            last_s = alone_s + recomputed_s * np.array(recompute_last)
        return JobSeconds(
            forward_s=_numbers(forward_s),
            backward_input_s=_numbers(input_s),
            backward_weight_s=_numbers(weight_s),
            receive_forward_s=_numbers(there),
            # The gradient of what a stage received goes back to the stage before it.
            receive_backward_s=(*_numbers(back[1:]), 0.0),
            last_backward_input_s=None if last_s is None else _numbers(last_s),
            sends_ahead_s=_numbers(self.first_weight_s * defers),
            last_sends_ahead_s=_numbers(weight_s * defers),
        )


def transfers(
    execution: Execution, receive_s: tuple[Floats, Floats]
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Return the transfers into stages and of gradients back from them (`receive_s`) that travel
    beside jobs, and those that a stage's forward and backward wait for with nothing to do.

    A runtime that does not overlap them waits for each ahead of the job that needs it: the first
    stage for what it sends forward, the last for what it sends back.
    """
    there_s, back_s = receive_s
    nothing = 0 * there_s, 0 * back_s
    if "stages" in execution.overlaps:
        return receive_s, nothing
    # A single stage sends nothing.
    if len(there_s) == 1:
        return nothing, nothing
    # Entry s of `there_s` is the way into stage s, of `back_s` the gradient's way out of it. Each
    # stage waits for what comes in; where nothing does, at the ends, for what it sends.
    return nothing, (np.append(there_s[1:2], there_s[1:]), np.append(back_s[1:], back_s[-1:]))


def cut_runs(chain: ChainCosts, cuts: Sequence[int]) -> BlockRuns:
    """Return the stages between these cuts of a chain, as runs."""
    at: NDArray[np.intp] = np.asarray(cuts)
    return BlockRuns(chain=chain, start=at[:-1], end=at[1:])


Record = TypeVar("Record", JobSeconds, RunTimes, RecomputeTimes, StageLoad, DataParallelSeconds)


def pick(records: Sequence[Record]) -> Record:
    """Return the record whose entry for stage s is that of the s-th record, for every field.

    Stages of meshes of their own are priced for each mesh; each stage then takes its own mesh's.
    """
    if all(record is records[0] for record in records):
        return records[0]
    kind = tuple if isinstance(records[0], JobSeconds) else np.array
    columns = {
        f.name: kind([getattr(record, f.name)[s] for s, record in enumerate(records)])
        for f in fields(records[0])
        if np.ndim(getattr(records[0], f.name))  # the others are left at their defaults
    }
    return type(records[0])(**columns)


def _numbers(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())

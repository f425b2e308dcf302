"""The stages of a table as ranks hold them: with what replicas exchange, the update and the bytes.

A `StageTable` says what blocks cost by themselves; dp, cp and ZeRO add the rest. The chain
dynamic program asks for all runs of a window (`RankBand`), who has a cut already for its stages
(`StageRuns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from costmodel.memory.bound import RankBound
from costmodel.time.clipping import ClipSeconds, clip_seconds
from costmodel.time.communication import (
    MASTER_FACTOR,
    DataParallelSeconds,
    adamw_seconds,
    data_parallel_seconds,
)
from costmodel.time.offload import host_step_seconds
from costmodel.time.stage import StageLoad, again_seconds
from costmodel.topology import dp_group
from planner.plan import Precision, Recompute
from search.partition.chain_problem import LeastNeeds, Line
from search.partition.chain_windows import Part, Window
from search.stages.run_kinds import RunKinds
from search.stages.runs import distinct

if TYPE_CHECKING:
    from search.stages.stage_table import StageTable

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """The stages of one cut, an array entry for each: seconds per microbatch, and once a step.

    `first_weight_s` is `weight_s` of the stage's first block.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    remade_s: Floats
    param_bytes: Floats
    num_params: Floats
    first_weight_s: Floats
    per_forward_s: Floats
    per_backward_s: Floats
    after_s: Floats

    def again_s(self, recomputed: Sequence[Recompute]) -> Floats:
        """Return what each stage's recomputation adds to its backward."""
        return again_of_stages(recomputed, forward_s=self.forward_s, remade_s=self.remade_s)


def again_of_stages(
    recomputed: Sequence[Recompute], *, forward_s: Floats, remade_s: Floats
) -> Floats:
    """Return what each stage's recomputation adds to its backward."""
    names = np.array(recomputed)
    return np.where(names == "selective", remade_s, np.where(names == "full", forward_s, 0.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBand:
    """A band (see `chain_problem.Band`) for one dp degree and ZeRO stage.

    `load`, `bare` (what replicas exchange, as exposed) and `update_s` have an entry for each of
    the `kinds` of runs.
    """

    kinds: RunKinds
    load: StageLoad
    bare: DataParallelSeconds
    update_s: Floats
    stages: RankStages

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds, the same for all choices."""
        seconds = self.load.forward_s + self.load.comm_forward_s + self.bare.forward_s
        spread = self._spread(seconds)
        return np.broadcast_to(spread, (len(self.stages.choices), *spread.shape))

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds by choice."""
        load = self.load
        seconds = load.backward_s + load.comm_backward_s + self.bare.backward_s
        again = np.stack([again_seconds(load, choice) for choice in self.stages.choices])
        return self._spread(seconds + again)

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds after the last job."""
        return self._spread(self.bare.once_s + self.update_s)

    @cached_property
    def copies_s(self) -> tuple[Floats, Floats]:
        """Seconds, by choice, in which a microbatch's activations leave a device and return."""
        down, up = zip(
            *(self.stages.table.copies_s(self.load, choice) for choice in self.stages.choices),
            strict=True,
        )
        return self._spread(np.stack(down)), self._spread(np.stack(up))

    def _spread(self, of_kinds: Any) -> Any:
        """Lay what is known of kinds out over the window."""
        return of_kinds[..., self.kinds.of]

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """About the bytes of a rank holding each run with this many microbatches in flight."""
        return self._spread(self._bytes[choice].conservative(in_flight))

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """What a rank holding each run needs at least."""
        return self._spread(self._bytes[choice].least(in_flight))

    def fits(self, in_flight: int, choice: int, limit_bytes: float, part: Part = ...) -> Flags:
        """Whether `least_bytes` are within a limit, of a part of the window."""
        return self._bytes[choice].may_fit(in_flight, limit_bytes)[self.kinds.of[part]]

    @cached_property
    def _bytes(self) -> tuple[RankBound, ...]:
        """By recompute choice."""
        stages = self.stages
        once = stages.table.once_bytes.max(initial=0.0)
        load = replace(self.load, frozen_bytes=self.load.frozen_bytes + once)
        return tuple(
            RankBound(
                load=load,
                num_microbatches=stages.num_microbatches,
                recompute=choice,
                replicas=stages.dp * stages.cp,
                zero=stages.zero,
                profile=stages.table.profile,
                precision=stages.table.precision,
                on_host=stages.table.on_host,
                receive_bytes=stages.table.receive_bytes(self.kinds.start, self.kinds.end),
                batch_bytes=stages.batch_bytes,
                splits_backward=stages.splits_backward,
            )
            for choice in stages.choices
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """`chain_dp.Stages` of a table under dp, cp and ZeRO."""

    table: StageTable
    dp: int
    cp: int
    zero: int
    choices: tuple[Recompute, ...]
    num_microbatches: int
    splits_backward: bool = False

    @property
    def batch_bytes(self) -> int:
        """Bytes of the global batch, which every rank is given whole."""
        samples = self.dp * self.table.microbatch_size * self.num_microbatches
        graph = self.table.graph
        return sum(graph.tensor[name].bytes_at(samples) for name in graph.batch_inputs)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.table.num_blocks

    def band(self, window: Window) -> RankBand:
        """Return the costs of every run of a window."""
        kinds, load = self.table.kinds(window)
        exchange, update_s = self._replica_seconds(window, load)
        bare = exchange.hidden_behind(
            self.table.profile,
            forward_s=load.forward_s + load.comm_forward_s,
            backward_s=load.backward_s + load.comm_backward_s,
            num_blocks=load.num_blocks,
        )
        return RankBand(kinds=kinds, load=load, bare=bare, update_s=update_s, stages=self)

    def runs(self, cuts: Sequence[int]) -> StageRuns:
        """Return what the stages between these cuts take."""
        at = np.asarray(cuts)
        first, end = at[:-1], at[1:]
        sums = {name: one[end] - one[first] for name, one in self.table.sums.items()}
        for i, j, size in self.table.ties:
            sums["param_bytes"] -= size * ((first <= i) & (j < end))
        num_blocks = (end - first).astype(float)
        exchange, _ = self._replica_seconds_of_kinds(
            sums["param_bytes"], num_blocks, sums["num_params"]
        )
        bare = exchange.hidden_behind(
            self.table.profile,
            forward_s=sums["forward_s"],
            backward_s=sums["backward_s"],
            num_blocks=num_blocks,
        )
        return StageRuns(
            **sums,
            first_weight_s=self.table.weight_s[first],
            per_forward_s=bare.forward_s,
            per_backward_s=bare.backward_s,
            after_s=bare.once_s,
        )

    def least_needs(self, limit_bytes: float) -> LeastNeeds:
        """Return what any run of blocks takes at least, and what fits a limit."""
        table = self.table
        backward_s, kept_bytes = zip(*map(table.least_sums, self.choices), strict=True)
        held_twice = sum(size for _, _, size in table.ties)
        ranks = RankBound(
            load=StageLoad(),
            num_microbatches=self.num_microbatches,
            recompute="none",
            replicas=self.dp * self.cp,
            zero=self.zero,
            profile=table.profile,
            precision=table.precision,
            on_host=table.on_host,
            batch_bytes=self.batch_bytes,
            splits_backward=self.splits_backward,
        )

        def lines(in_flight: int) -> tuple[Line, ...]:
            found = ranks.lines(in_flight, limit_bytes * (1 + 1e-9))
            return tuple(
                (float(live), slope, slope * held_twice - float(fixed))
                for live, slope, fixed in found
            )

        return LeastNeeds(
            backward_s=backward_s,
            kept_bytes=kept_bytes,
            param_bytes=table.sums["param_bytes"].tolist(),
            lines=lines,
        )

    def optimizer_s(self, param_bytes: float, num_params: float) -> float:
        """Return the update of a rank that holds so many bytes in so many tensors, with what it
        does itself about clipping if gradients are clipped.
        """
        update = self.adamw_s(param_bytes, num_params)
        if not self.table.costs.clips_gradients:
            return update
        clip = self.clip_seconds(param_bytes, num_params)
        return update + clip.norm_s + clip.scale_s

    def adamw_s(self, param_bytes: float, num_params: float) -> float:
        """Return the optimizer's step of a rank that holds so many bytes in so many tensors, where
        it is made: on the device or on its host.
        """
        step_seconds = host_step_seconds if self.table.on_host.optimizer else adamw_seconds
        return step_seconds(
            self.table.profile,
            param_bytes=param_bytes / (self.dp * self.cp if self.zero else 1),
            num_tensors=int(num_params),
            sharded=bool(self.zero) and self.dp * self.cp > 1,
            precision=self.table.precision,
        )

    def clip_seconds(self, param_bytes: float, num_params: float) -> ClipSeconds:
        """Return what a rank does about clipping that holds so many bytes in so many tensors."""
        shards = self.dp * self.cp if self.zero else 1
        return clip_seconds(
            self.table.profile,
            gradient_bytes=param_bytes * gradient_factor(self.table.precision) / shards,
            num_tensors=int(num_params),
            on_host=self.table.on_host.optimizer and shards > 1,
        )

    def _replica_seconds(
        self, window: Window, load: StageLoad
    ) -> tuple[DataParallelSeconds, Floats]:
        """Return what each run exchanges with its replicas, nothing hidden, and its update.

        Runs of equal bytes, blocks and tensors cost the same, so each kind is asked once.
        """
        table = self.table
        key = (self.dp, self.cp, self.zero, window)
        if key not in table.replica_seconds:
            table.replica_seconds[key] = self._replica_seconds_of_kinds(
                load.param_bytes, load.num_blocks, load.num_params
            )
        return table.replica_seconds[key]

    def _replica_seconds_of_kinds(
        self, param_bytes: Floats, num_blocks: Floats, num_params: Floats
    ) -> tuple[DataParallelSeconds, Floats]:
        unique, inverse = distinct(param_bytes, num_blocks, num_params)
        answers = np.array([self._replica_seconds_of(*kind) for kind in unique.tolist()])
        *exchange, update = answers.T[:, inverse]
        return _exchange(exchange), update

    def _replica_seconds_of(
        self, param_bytes: float, num_blocks: float, num_params: float
    ) -> tuple[float, ...]:
        """Return the seconds of `DataParallelSeconds`, in its order, and the optimizer's."""
        key = (self.dp, self.cp, self.zero, self.table.tp, param_bytes, num_blocks, num_params)
        memo = self.table.replica_memo
        if key not in memo:
            profile = self.table.profile
            seconds = data_parallel_seconds(
                profile,
                dp_group(profile.cluster, dp=self.dp, cp=self.cp, tp=self.table.tp),
                zero_stage=self.zero,
                param_bytes=param_bytes,
                num_blocks=int(num_blocks),
                num_tensors=int(num_params),
                gradient_bytes=param_bytes * gradient_factor(self.table.precision),
                on_host=self.table.on_host.optimizer,
            )
            memo[key] = (
                *(float(getattr(seconds, name)) for name in _EXCHANGE),
                self.optimizer_s(param_bytes, num_params),
            )
        return memo[key]


def gradient_factor(precision: Precision) -> int:
    """Return the bytes of a gradient sum over those of its parameter."""
    return MASTER_FACTOR if precision == "bf16" else 1


_EXCHANGE = tuple(f.name for f in fields(DataParallelSeconds))


def _exchange(values: Sequence[Any]) -> DataParallelSeconds:
    return DataParallelSeconds(**dict(zip(_EXCHANGE, values, strict=True)))

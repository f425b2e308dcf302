"""What every run of consecutive blocks costs, for one tp degree, microbatch size and layout.

The price of a block class is asked once and laid out along the chain, so a table of a
thousand equal layers takes as many questions as one of eight. Runs are built length by
length from the cost model's own `StageLoad` arithmetic; nothing is priced here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.boundary import block_entry_seconds, output_placements
from costmodel.cache import CostCache
from costmodel.clipping import ClipSeconds, clip_seconds
from costmodel.communication import (
    MASTER_FACTOR,
    DataParallelSeconds,
    adamw_seconds,
    boundary_seconds,
    data_parallel_seconds,
)
from costmodel.inputs import input_seconds
from costmodel.stage import StageLoad, again_seconds, block_load, join
from costmodel.topology import dp_group, hop_group, split_axes
from planner.graph import ModelGraph
from planner.placement import Shard
from planner.plan import ClassLayout, Precision, Recompute
from profiles import Group, Profile
from search.chain_windows import Window
from search.on_host import NOTHING, OnHost
from search.rank_bytes import RankBytes
from search.run_kinds import Indices, Repetition, RunKinds
from search.runs import Runs, distinct, used_fields

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_KEPT_RUNS = 100_000
"""Runs of windows and their kinds that a table keeps: a few MB."""


@dataclass(kw_only=True, eq=False)
class StageTable:
    """Loads of all runs of blocks; keeps what it computed.

    `layouts` is one ClassLayout per class, in class order, or empty at tp 1; `cp_layouts`
    likewise on cp. `once_bytes` (n),
    known once `blocks` is, are side inputs a rank holds once whatever is in flight.
    `replica_memo` (seconds by degrees, bytes and counts) may be shared by all tables.
    `rank_ends` keeps simulations.
    """

    costs: CostCache
    layouts: tuple[ClassLayout, ...]
    tp: int
    microbatch_size: int
    cp: int = 1
    cp_layouts: tuple[ClassLayout, ...] = ()
    precision: Precision = "model"
    on_host: OnHost = NOTHING
    once_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    replica_memo: dict[tuple, tuple[float, ...]] = field(default_factory=dict)
    replica_seconds: dict[tuple, tuple[DataParallelSeconds, Floats]] = field(default_factory=dict)
    rank_ends: dict[tuple, tuple[float, ...]] = field(default_factory=dict)
    _kinds: dict[Window, tuple[RunKinds, StageLoad]] = field(default_factory=dict)
    _hops: dict[Group, tuple[Floats, Floats]] = field(default_factory=dict)
    _least_inputs: dict[tuple[bool, int], float] = field(default_factory=dict)

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.costs.graph

    @property
    def profile(self) -> Profile:
        """The machine."""
        return self.costs.profile

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return len(self.graph.blocks)

    def inputs_s(self, blocks: Iterable[int], num_microbatches: int) -> float:
        """Return what the rank that has these blocks, the first among them, loads of a batch."""
        return input_seconds(
            self.costs,
            blocks,
            microbatch_size=self.microbatch_size,
            num_microbatches=num_microbatches,
        )

    def least_inputs_s(self, *, pp: int, num_microbatches: int) -> float:
        """Return what is loaded of a batch ahead of everything else, whatever the stages."""
        blocks = range(self.num_blocks if pp == 1 else 1)
        key = pp == 1, num_microbatches
        if key not in self._least_inputs:
            self._least_inputs[key] = self.inputs_s(blocks, num_microbatches)
        return self._least_inputs[key]

    @cached_property
    def by_class(self) -> Mapping[int, ClassLayout]:
        """Layouts by class index."""
        return {layout.class_index: layout for layout in self.layouts}

    @cached_property
    def by_class_on_cp(self) -> Mapping[int, ClassLayout]:
        """Layouts on cp by class index."""
        return {layout.class_index: layout for layout in self.cp_layouts}

    @cached_property
    def blocks(self) -> StageLoad:
        """The load of each block, as arrays along the chain, entry redistributions included."""
        prices = {
            index: self.costs.block(
                index,
                self.tp,
                self.microbatch_size,
                self.by_class.get(index),
                cp=self.cp,
                cp_layout=self.by_class_on_cp.get(index),
            )
            for index in {block.class_index for block in self.graph.blocks}
        }
        loads = {index: block_load(price) for index, price in prices.items()}
        classes = [block.class_index for block in self.graph.blocks]
        columns: dict[str, Any] = {
            f.name: np.array([getattr(loads[index], f.name) for index in classes], dtype=float)
            for f in used_fields()
        }
        sides = [
            frozenset(block.inputs[at] for at in prices[block.class_index].side_positions)
            for block in self.graph.blocks
        ]
        of_side = {
            names: self.costs.side_bytes(names, self.microbatch_size) for names in set(sides)
        }
        columns["side_bytes"] = np.array([of_side[names][0] for names in sides], dtype=float)
        self.once_bytes = np.array([of_side[names][1] for names in sides], dtype=float)
        for there, back in self._entries():
            columns["comm_forward_s"] = columns["comm_forward_s"] + there
            columns["comm_backward_s"] = columns["comm_backward_s"] + back
        return StageLoad(**columns)

    def _entries(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield, for tp and for cp, the seconds of bringing each block's inputs to their place."""
        axes = split_axes(self.profile.cluster, tp=self.tp, cp=self.cp)
        sides = (("tp", self.by_class, self.by_class_on_cp), ("cp", self.by_class_on_cp,
                 self.by_class))  # fmt: skip
        for axis, mine, others in sides:
            # Where all boundaries lie alike nothing has to move.
            if len({p for one in mine.values() for p in (*one.inputs, *one.outputs)}) <= 1:
                continue
            other_size = self.cp if axis == "tp" else self.tp
            seconds = [
                block_entry_seconds(
                    self.graph, index, mine, self.profile, group=axes[axis].group,
                    microbatch_size=self.microbatch_size,
                    other_layouts=others, other_size=other_size,
                )
                for index in range(self.num_blocks)
            ]  # fmt: skip
            there, back = np.array(seconds).T
            yield there, back

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds of each block, collectives included."""
        return self.blocks.forward_s + self.blocks.comm_forward_s

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds of each block without recompute."""
        return self.blocks.backward_s + self.blocks.comm_backward_s

    @cached_property
    def weight_s(self) -> Floats:
        """Seconds of each block's backward that are weight gradients, as the cost model splits."""
        return self.blocks.weight_s

    def ahead_s(self, *, zero: int, choices: Sequence[Recompute]) -> Floats:
        """Most seconds of each block's backward that may come after its gradient is sent on."""
        return self.weight_s if zero == 0 and "none" in choices else 0 * self.weight_s

    @cached_property
    def sums(self) -> Mapping[str, Floats]:
        """Running sums along the chain with a leading zero; a run is a difference of two."""
        columns = {
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "weight_s": self.weight_s,
            "remade_s": self.blocks.remade_s,
            "param_bytes": self.blocks.param_bytes,
            "num_params": self.blocks.num_params,
        }
        return {name: np.append(0.0, np.cumsum(values)) for name, values in columns.items()}

    @cached_property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """(i, j, local bytes): blocks i < j share trainable parameters, j being the next user."""
        last_user: dict[str, int] = {}
        shared: dict[tuple[int, int], float] = {}
        for block in self.graph.blocks:
            layout = self.by_class.get(block.class_index)
            for position, name in enumerate(block.params):
                meta = self.graph.tensor[name]
                if meta.kind != "param" or not meta.requires_grad:
                    continue
                if name in last_user and last_user[name] != block.index:
                    split = layout is not None and layout.params[position].startswith("S")
                    size = meta.bytes_at(1) // (self.tp if split else 1)
                    pair = (last_user[name], block.index)
                    shared[pair] = shared.get(pair, 0.0) + size
                last_user[name] = block.index
        return tuple((i, j, size) for (i, j), size in shared.items())

    @cached_property
    def whole(self) -> StageLoad:
        """The load of all blocks as one stage."""
        columns = {f.name: getattr(self.blocks, f.name).tolist() for f in used_fields()}
        total = join(
            StageLoad(**{name: values[block] for name, values in columns.items()})
            for block in range(self.num_blocks)
        )
        return replace(
            total,
            param_bytes=total.param_bytes - sum(size for _, _, size in self.ties),
            frozen_bytes=total.frozen_bytes + self.once_bytes.max(initial=0.0),
        )

    def kinds(self, window: Window) -> tuple[RunKinds, StageLoad]:
        """Return the kinds of a window's runs and their loads; the last ones asked are kept."""
        if window not in self._kinds:
            if sum(kinds.of.size for kinds, _ in self._kinds.values()) > _MOST_KEPT_RUNS:
                self._kinds.clear()
                self.replica_seconds.clear()
            kinds = self._repetition.kinds(window)
            self._kinds[window] = kinds, self.runs.loads(kinds.start, kinds.end)
        return self._kinds[window]

    @cached_property
    def _repetition(self) -> Repetition:
        """Where equal blocks follow each other, with equal values arriving and leaving."""
        n = self.num_blocks
        arriving = self._arrivals.reshape(-1, n + 1)
        columns = [getattr(self.blocks, f.name) for f in used_fields()]
        rows = np.stack([*columns, *arriving[:, :-1], *arriving[:, 1:]], axis=1)
        labels = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        tied = sorted({block for i, j, _ in self.ties for block in (i, j)})
        labels[tied] = -1 - np.arange(len(tied))
        return Repetition(labels)

    @cached_property
    def runs(self) -> Runs:
        """The loads of any runs of blocks."""
        return Runs(blocks=self.blocks, ties=self.ties)

    @cached_property
    def _arrivals(self) -> Floats:
        """Bytes a stage that starts at block i receives, and of the gradients it sends back.

        (2, 2, n + 1): forward and back; all, and of tensors that every tp rank holds whole.
        0 at the ends. What block i itself takes from earlier blocks: all of it in a chain, the
        least of it where skips reach further.
        """
        made = output_placements(self.graph, self.by_class)
        on_cp = output_placements(self.graph, self.by_class_on_cp)
        sizes = np.zeros((2, 2, self.num_blocks + 1))
        for block in self.graph.blocks:
            for name in dict.fromkeys(block.inputs):
                if self.graph.producer.get(name, block.index) < block.index:
                    meta = self.graph.tensor[name]
                    split = isinstance(made[name], Shard)
                    size = meta.bytes_at(self.microbatch_size) // (self.tp if split else 1)
                    size //= self.cp if isinstance(on_cp[name], Shard) else 1
                    amounts = np.array([size, 0 if split else size])
                    sizes[0, :, block.index] += amounts
                    sizes[1, :, block.index] += amounts * meta.requires_grad
        return sizes

    def hop_s(self, *, dp: int, cp: int, pp: int) -> Floats:
        """Seconds of one transfer into a stage that starts at block i (n + 1)."""
        return self._hop_seconds(dp, cp, pp)[0]

    def back_hop_s(self, *, dp: int, cp: int, pp: int) -> Floats:
        """Seconds of the gradient's transfer back from it (n + 1), no more than `hop_s`."""
        return self._hop_seconds(dp, cp, pp)[1]

    def _hop_seconds(self, dp: int, cp: int, pp: int) -> tuple[Floats, Floats]:
        cluster = self.profile.cluster
        hop = hop_group(cluster, dp=dp, cp=cp, tp=self.tp, pp=pp)
        if hop not in self._hops:
            tp = split_axes(cluster, tp=self.tp)["tp"].group
            kinds, inverse = np.unique(
                np.moveaxis(self._arrivals, 1, 2).reshape(-1, 2), axis=0, return_inverse=True
            )
            seconds = np.array(
                [
                    boundary_seconds(self.profile, hop, tp, num_bytes=size, whole_bytes=whole)
                    for size, whole in kinds.tolist()
                ]
            )
            there, back = seconds[inverse].reshape(2, -1)
            self._hops[hop] = there, back
        return self._hops[hop]

    def receive_bytes(self, start: Indices, end: Indices) -> Floats:
        """Bytes of the buffers each run posts for its input and its output's gradient."""
        there, back = self._arrivals[:, 0]
        return there[start] + back[end]

    def most_edge_bytes(self, first: int, end: int, *, in_flight: int) -> float:
        """Return the most that a run needs and longer ones that hold it may not.

        That is, what it receives and sends for each microbatch, in both directions, once as a
        message and once as a value; and sums for weights that blocks outside use too.
        """
        edges = float(self._arrivals[:, 0, first].sum() + self._arrivals[:, 0, end].sum())
        copies = sum(size for _, _, size in self.ties) * gradient_factor(self.precision)
        return 2 * ((in_flight + 2) * edges + copies)

    def with_replicas(
        self,
        *,
        dp: int,
        cp: int,
        zero: int,
        choices: tuple[Recompute, ...],
        num_microbatches: int = 1,
        splits_backward: bool = False,
    ) -> RankStages:
        """Return the stages as ranks hold them under these degrees."""
        return RankStages(
            table=self,
            dp=dp,
            cp=cp,
            zero=zero,
            choices=choices,
            num_microbatches=num_microbatches,
            splits_backward=splits_backward,
        )


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
        names = np.array(recomputed)
        full = np.where(names == "full", self.forward_s, 0.0)
        return np.where(names == "selective", self.remade_s, full)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBand:
    """A band (see `chain_paths.Band`) for one dp degree and ZeRO stage.

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

    def _spread(self, of_kinds: Any) -> Any:
        """Lay what is known of kinds out over the window."""
        return of_kinds[..., self.kinds.of]

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """About the bytes of a rank holding each run with this many microbatches in flight."""
        return self._spread(self._bytes[choice].guess(in_flight))

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """What a rank holding each run needs at least."""
        return self._spread(self._bytes[choice].least(in_flight))

    def fits(self, in_flight: int, choice: int, limit_bytes: float) -> Flags:
        """Whether `least_bytes` are within a limit."""
        return self._spread(self._bytes[choice].may_fit(in_flight, limit_bytes))

    @cached_property
    def _bytes(self) -> tuple[RankBytes, ...]:
        """By recompute choice."""
        stages = self.stages
        once = stages.table.once_bytes.max(initial=0.0)
        load = replace(self.load, frozen_bytes=self.load.frozen_bytes + once)
        return tuple(
            RankBytes(
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
        """Return the optimizer's step of a rank that holds so many bytes in so many tensors."""
        return adamw_seconds(
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

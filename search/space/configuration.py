"""What a plan is but for its stage boundaries and the placements inside blocks.

A `Shape` is a set of configurations that differ in schedule, stages a rank and ZeRO stage alone;
they share most bounds, so a search opens a shape only when it may hold the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from planner.language.layout.axes import FOLDED, Degrees
from planner.language.plan import Recompute
from planner.language.plan.replication import Replication
from planner.language.plan.spelled import spell_choices
from planner.language.schedule import find_schedule
from planner.language.schedule.job_order import JobOrder

RECOMPUTE_CHOICES: tuple[Recompute, ...] = ("none", "selective", "full")


class BlockSizes(NamedTuple):
    """What the programs of blocks, and so their layouts and tables, depend on beside the model."""

    tp: int
    """Parts of parameters and heads."""
    microbatch_size: int
    """Samples of a microbatch in each part that the batch axes cut."""
    cp: int = 1
    """Parts of every sequence."""
    ep: int = 1
    """Parts of the experts."""
    etp: int = 1
    """Parts of each expert's matrices."""
    hp: int = 1
    """Parts of each of those of the sequences, and of the heads."""

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """All but the microbatch size, in the order in which searches open them."""
        return self.ep, self.cp, self.hp, self.tp, self.etp

    @property
    def with_whole_sequences(self) -> BlockSizes:
        """The sizes without those that cut sequences."""
        return self._replace(cp=1, hp=1)


ButForCopies = tuple[int, int, BlockSizes]
"""Parts of a batch, pipeline ranks, and sizes of blocks."""


class _OnMesh:
    """Names for sizes of a stage's mesh."""

    __slots__ = ()
    degrees: Degrees
    pp: int
    microbatch_size: int

    @property
    def block_sizes(self) -> BlockSizes:
        """What names the tables that hold its blocks' prices."""
        of = self.degrees
        sizes = of["tp"], self.microbatch_size, of["cp"], of["ep"], of["etp"], of["hp"]
        return BlockSizes(*sizes)

    @property
    def batch_parts(self) -> int:
        """Parts of a microbatch: ranks of all axes that cut the batch, dp among them."""
        return self.degrees.along("batch")

    @property
    def but_for_copies(self) -> ButForCopies:
        """What it shares with those that differ in how many copies of ZeRO's shards there are."""
        return self.batch_parts, self.pp, self.block_sizes

    @property
    def cp(self) -> int:
        """Parts of every sequence, but for those that heads are exchanged for (hp)."""
        return self.degrees["cp"]

    @property
    def sequence_parts(self) -> int:
        """Parts of every sequence between blocks."""
        return self.degrees["cp"] * self.degrees["hp"]

    @property
    def tp(self) -> int:
        """Parts of parameters and heads."""
        return self.degrees["tp"]

    @property
    def ep(self) -> int:
        """Parts of the experts."""
        return self.degrees["ep"]


class Pipeline(NamedTuple):
    """What the job table of a configuration follows from."""

    schedule: str
    """Its name."""
    pp: int
    """Pipeline ranks."""
    vpp: int
    """Stages of each."""
    num_microbatches: int
    """Microbatches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(_OnMesh):
    """One point of the space.

    Attributes:
        degrees: sizes of the mesh of a stage.
        pp: pipeline ranks.
        vpp: stages of each pipeline rank.
        microbatch_size: samples of a microbatch in each part that the batch axes cut.
        num_microbatches: microbatches of a step.
        schedule: name of the pipeline schedule.
        zero: stage of ZeRO.
        recompute: a choice for all stages, ``mixed`` (any by stage), or those that stages choose
            between, joined by ``|``.
        stage_tps: empty where all stages have this mesh, else each stage's tp.
        device_groups: of a cluster of several groups of devices, that of each stage.
        shares: as in `Plan`.
        unit: samples that belong together; sizes of microbatches and shares count these as one.
    """

    degrees: Degrees
    pp: int
    vpp: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    zero: int
    recompute: str
    stage_tps: tuple[int, ...] = ()
    device_groups: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    unit: int = 1

    @property
    def pipeline(self) -> Pipeline:
        """What its job table follows from."""
        return Pipeline(self.schedule, self.pp, self.vpp, self.num_microbatches)

    @property
    def replication(self) -> Replication:
        """How ranks that hold the same parameters share them."""
        return Replication.on(self.degrees, zero_stage=self.zero)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have jobs of their own with something to do: ZeRO's are made
        with the input's, since FSDP2 reduces them when a block's backward ends.
        """
        return find_schedule(self.schedule).splits_backward and not self.replication.is_sharded

    @property
    def stated_order(self) -> JobOrder:
        """What its schedule states of its order of jobs."""
        schedule = find_schedule(self.schedule)
        return schedule.job_order(pp=self.pp, num_microbatches=self.num_microbatches)

    @property
    def order(self) -> JobOrder:
        """The same with weight gradients made as `splits_backward` says."""
        order = self.stated_order
        return order if order.splits_backward == self.splits_backward else order.unsplit

    @property
    def num_jobs(self) -> int:
        """Forwards and backwards of a step, of all ranks."""
        return 2 * self.pp * self.vpp * self.num_microbatches

    @property
    def label(self) -> str:
        """What it decides: ``dp 2 x tp 4 x pp 8, 16 microbatches of 1, 1f1b, ZeRO 1, recompute
        none``.
        """
        sizes: dict[str, object] = dict(self.degrees)
        if self.stage_tps:
            sizes["tp"] = "/".join(map(str, self.stage_tps))
        sizes["pp"] = self.pp
        if self.device_groups:
            sizes["pp"] = f"{self.pp} on {'/'.join(self.device_groups)}"
        sizes |= {axis.name: self.degrees[axis.name] for axis in FOLDED}
        return spell_choices(
            sizes, self.vpp, (self.num_microbatches, self.microbatch_size * self.unit),
            self.schedule, self.zero, self.recompute,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(_OnMesh):
    """Configurations of equal degrees and microbatches: one for each option and ZeRO stage.

    Attributes:
        degrees: sizes of the mesh of a stage.
        pp: pipeline ranks.
        microbatch_size: samples of a microbatch in each part that the batch axes cut.
        num_microbatches: microbatches of a step.
        options: (schedule, stages of each pipeline rank) to choose from.
        zeros: stages of ZeRO to choose from.
        recompute: as in `Configuration`.
        unit: as in `Configuration`.
    """

    degrees: Degrees
    pp: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[tuple[str, int], ...]
    zeros: tuple[int, ...]
    recompute: str
    unit: int = 1

    @property
    def num_configurations(self) -> int:
        """How many configurations the shape holds."""
        return len(self.options) * len(self.zeros)

    def configurations(self) -> Iterator[Configuration]:
        """Yield each of them."""
        for schedule, vpp in self.options:
            for zero in self.zeros:
                yield Configuration(
                    degrees=self.degrees, pp=self.pp, vpp=vpp,
                    microbatch_size=self.microbatch_size,
                    num_microbatches=self.num_microbatches,
                    schedule=schedule, zero=zero, recompute=self.recompute, unit=self.unit,
                )  # fmt: skip


def recompute_choices(recompute: str) -> tuple[Recompute, ...]:
    """Return what each stage may choose between."""
    if recompute == "mixed":
        return RECOMPUTE_CHOICES
    return tuple(cast("Recompute", choice) for choice in recompute.split("|"))

"""Interleaved stages whose pp ranks have meshes of their own.

All stages of a pp rank share its mesh (`planner.language.plan`), and their boundaries are as even
as blocks allow under one of the meshes (`partition/interleaved`). What remains is, for each rank r,
a mesh and a recompute choice. `Assignments` lists all choices by the bound of their step time, best
first:

    f(choices of ranks 0 .. r) = `least_end_s`, with the stages of ranks after r at the least they
                                 take under any choice

f is exact for a complete list of choices and a lower bound for a part of it. A step costs
O(choices * stages); there are choices^pp steps at worst, in practice those that may beat the best.
The node of a mix counts as one configuration until a plan of it was evaluated; what it lists
afterwards closes the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count

import numpy as np
from numpy.typing import NDArray

from search.branch_and_bound import EvaluatedPlan, Node
from search.candidates import Candidates
from search.meshes.mix import Mix
from search.nodes.partitions import APART, JOBS_PER_ESTIMATE, infeasible_stages
from search.partition.chain_problem import Cut, InfeasibleStage
from search.partition.interleaved import InterleavedStages, StageSeconds, least_end_s
from search.search_state import Outcomes, SearchState
from search.stages.rank_stages import RankStages

EVEN_BEATEN = "own meshes: the even cut cannot beat the best"
EVEN_TOO_LARGE = "own meshes, memory: the even cut does not fit"

_COLUMNS = tuple(field.name for field in fields(StageSeconds))


@dataclass(frozen=True, kw_only=True, eq=False)
class EvenMix:
    """Meshes that pp ranks may choose from for their stages between fixed cuts.

    A choice is a recompute choice of the first member, then of the second, and so on, counted as in
    `MixedCostWindow`.

    Attributes:
        mix: the meshes.
        cuts: the stage boundaries.
        even_of: the members (indices) under which these boundaries are the even ones.
        limit_bytes: memory of one device.
        infeasible: choices of a rank (that of the stage named) whose estimate is over the limit.
    """

    mix: Mix
    cuts: tuple[int, ...]
    even_of: tuple[int, ...]
    limit_bytes: float
    infeasible: tuple[InfeasibleStage, ...] = ()

    @cached_property
    def _stages(self) -> tuple[InterleavedStages, ...]:
        """The stages under each member's mesh."""
        return tuple(
            InterleavedStages.between(
                RankStages(table=member.table, configuration=member.as_held, is_mixed=True),
                self.cuts,
            )
            for member in self.mix.members
        )

    @property
    def homes(self) -> NDArray[np.intp]:
        """The pp rank of each stage."""
        return self._stages[0].cut.homes

    @cached_property
    def seconds(self) -> StageSeconds:
        """What stages (ranks, of the tail) take, by choice."""
        every: list[StageSeconds] = []
        for member, stages in zip(self.mix.members, self._stages, strict=True):
            # A gradient goes back to a stage of another mesh perhaps: the cheapest is a bound.
            back_transfer_s = self.mix.least_transfers_s(member)[1]
            every += [
                stages.seconds(stages.cut.again_s([name] * self.cuts[-1]), back_transfer_s)
                for name in stages.ranks.choices
            ]
        return StageSeconds(
            **{name: np.stack([getattr(seconds, name) for seconds in every]) for name in _COLUMNS}
        )

    @cached_property
    def least_s(self) -> StageSeconds:
        """The least of each under any choice; the most of what may come later."""
        # What may come after a gradient is sent shortens a path, so there the most is the bound.
        least = {name: getattr(self.seconds, name).min(axis=0) for name in _COLUMNS}
        return StageSeconds(**least | {"ahead_s": self.seconds.ahead_s.max(axis=0)})

    def step_bound(self, seconds: StageSeconds) -> float:
        """Return a step time that stages which take so long cannot beat."""
        configuration = self.mix.configuration
        start_s = min(member.table.least_inputs_s(configuration) for member in self.mix.members)
        return start_s + least_end_s(configuration, self.homes, seconds)

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Whether each rank may hold its stages (choice, rank), as far as its least bytes say."""
        found = np.concatenate([stages.least_bytes <= self.limit_bytes for stages in self._stages])
        for stage in self.infeasible:
            # All stages of a rank share its choice, so any of them stands for the rank.
            found[stage.choice, self.homes[stage.stage]] = False
        return found

    def is_known(self, cut: Cut) -> bool:
        """Whether a choice is of one mesh, and its cut that of all plans of this mesh."""
        members = set(self.mix.indices(cut))
        return len(members) == 1 and members <= set(self.even_of)

    def without(self, infeasible: Sequence[InfeasibleStage]) -> EvenMix:
        """Return the same without some ranks' choices."""
        return replace(self, infeasible=(*self.infeasible, *infeasible))


def even_mixes(candidates: Candidates, mix: Mix, limit_bytes: float) -> Iterator[EvenMix]:
    """Yield a mix for each cut that is as even as blocks allow under one of the meshes."""
    even_of: dict[tuple[int, ...], list[int]] = {}
    for index, member in enumerate(mix.members):
        # Each cut that is the even one under some mesh is tried once, with all meshes.
        cuts = candidates.interleaved(member.configuration, member.table).cut.cuts
        even_of.setdefault(cuts, []).append(index)
    for cuts, indices in even_of.items():
        yield EvenMix(mix=mix, cuts=cuts, even_of=tuple(indices), limit_bytes=limit_bytes)


class Assignments:
    """All choices of a mix whose bound is under a ceiling, best first.

    Of the recomputations that a rank of one mesh could do with, the first counts: others are no
    faster.
    """

    def __init__(self, mix: EvenMix, ceiling: float) -> None:
        self.mix = mix
        self._ceiling = ceiling
        self._heap: list[tuple[float, int, int, tuple[int, ...]]] = []
        self._ticket = count()
        members, kinds = len(mix.mix.members), mix.mix.num_recompute_choices
        # (member, recomputation, rank)
        by_member = mix.fits.reshape(members, kinds, -1)
        # (member, rank): the lightest recomputation that fits, numbered among all choices.
        first = by_member.argmax(axis=1) + kinds * np.arange(members)[:, None]
        # A rank's memory depends on its own choice alone, so each rank is looked at by itself.
        self._options = [
            [int(first[member, rank]) for member in np.flatnonzero(by_member[:, :, rank].any(1))]
            for rank in range(by_member.shape[2])
        ]
        self.fits = all(self._options)
        if self.fits:
            self._extend(())

    @property
    def bound(self) -> float:
        """No choice that is left is faster; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def advance(self) -> Cut | None:
        """Take one step; return a cut when the choices of all ranks are made."""
        bound, _, _, chosen = heapq.heappop(self._heap)
        if len(chosen) < len(self._options):
            self._extend(chosen)
            return None
        choices = tuple(chosen[rank] for rank in self.mix.homes.tolist())
        return Cut(cuts=self.mix.cuts, choices=choices, value=bound)

    def _extend(self, chosen: tuple[int, ...]) -> None:
        """Put each choice that the next rank may make behind those that are made."""
        rank = len(chosen)
        for choice in self._options[rank]:
            bound = self.mix.step_bound(self._seconds((*chosen, choice)))
            if bound < self._ceiling:
                # Of equal bounds the longest list first, so that a plan is complete soon.
                entry = (bound, -rank, next(self._ticket), (*chosen, choice))
                heapq.heappush(self._heap, entry)

    def _seconds(self, chosen: tuple[int, ...]) -> StageSeconds:
        """Return what stages take with these choices of the first ranks, the rest at its least."""
        made, ranks = np.array(chosen), np.arange(len(chosen))
        # A rank's choice is that of all its stages; the tail is the rank's.
        known = np.flatnonzero(self.mix.homes < len(chosen))
        columns = {}
        for name in _COLUMNS:
            # Ranks without a choice yet stand at their least: the bound of all ways to go on.
            values = getattr(self.mix.least_s, name).copy()
            by_choice = getattr(self.mix.seconds, name)
            if name == "tail_s":
                values[ranks] = by_choice[made, ranks]
            else:
                values[known] = by_choice[made[self.mix.homes[known]], known]
            columns[name] = values
        return StageSeconds(**columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class InterleavedMixNode(Node[SearchState]):
    """A mix of interleaved stages.

    Attributes:
        mix: the meshes, and the even cut of the stages.
        assignments: the choices that are left; None before they are listed.
        evaluated: choices that were evaluated, by stage.
    """

    mix: EvenMix
    assignments: Assignments | None = None
    evaluated: frozenset[tuple[int, ...]] = frozenset()

    @property
    def num_configurations(self) -> int:
        """A single configuration, until a plan of it was evaluated."""
        return int(not self.evaluated)

    @property
    def label(self) -> str:
        """What is mixed."""
        return self.mix.mix.label

    def refine(self, search: SearchState) -> Outcomes:
        """Take one step in the list of choices; evaluate a choice that is complete."""
        node, assignments = self, self.assignments
        if assignments is None:
            assignments = Assignments(self.mix, search.to_beat_s)
            # Some rank can hold its stages under no choice of mesh and recomputation.
            if not assignments.fits:
                search.prune(EVEN_TOO_LARGE, self.num_configurations)
                return
        else:
            cut = assignments.advance()
            if cut is not None and not self._is_evaluated(cut):
                done = self._evaluate(search, cut)
                if done is not None and not search.fits(done):
                    yield self._without_infeasible(search.limits, cut, done)
                    return
                if not self.evaluated:
                    if done is None:
                        search.prune(APART)
                    else:
                        search.num_evaluated += 1
                if done is not None:
                    yield done
                node = replace(self, evaluated=self.evaluated | {cut.choices})
        if assignments.bound == float("inf"):
            search.prune(EVEN_BEATEN, node.num_configurations)
        else:
            bound = max(self.bound, assignments.bound)
            yield replace(node, assignments=assignments, bound=bound)

    def _is_evaluated(self, cut: Cut) -> bool:
        """Whether a choice was evaluated here, or as a configuration of one mesh."""
        return cut.choices in self.evaluated or self.mix.is_known(cut)

    def _evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        mix, configuration = self.mix.mix, self.mix.mix.configuration
        if self.evaluated:
            search.extra_work += (
                JOBS_PER_ESTIMATE
                + 2 * configuration.pp * configuration.vpp * configuration.num_microbatches
            )
            search.num_other_partitions += 1
        return mix.evaluate(search.candidates, cut)

    def _without_infeasible(
        self, limits: Mapping[str, float], cut: Cut, done: EvaluatedPlan
    ) -> InterleavedMixNode:
        """Return the mix, to be listed again without the choices of ranks that are too large."""
        mix = self.mix
        infeasible = infeasible_stages(done, cut, (), limits, mix.mix.tables(cut))
        return replace(self, mix=mix.without(tuple(infeasible)), assignments=None)

"""Compiling the blocks of a rank's stages, and saying which run op by op.

Compiled are the plan's own sizes of microbatches, before the training, and others when a second
batch brings them:

    batch of 8 in 2 microbatches on dp 2    2 2 | 2 2    the plan's, compiled ahead
    the last of a pass, of 6                1 2 | 1 2    1 is new, and runs op by op
    the last of the second pass             1 2 | 1 2    1 is compiled, by all ranks together

A size that comes once would take a compiler longer than it saves. Beyond `MOST_SIZES` they run op
by op. How a batch is split is known on every rank, so all ranks meet a size at the same time, and
those without a microbatch of it wait where the others compile. They tell each other of every
block, so that nobody waits for longer than a block takes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.graph.batch_split import BatchSplit
from planner.language.plan import Plan
from planner.runtime.process.environment import KERNELS
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.compiled.graphs import Capture, CudaCapture
from planner.runtime.stage.compiled.kernels import Compiler, CompilerFailed
from planner.runtime.stage.compiled.sizes import Size, places_of
from planner.runtime.stage.compiled.trace import NotCompilable
from planner.runtime.stage.programs import Programs

MOST_SIZES = 8
"""Sizes of microbatches that are compiled beside the plan's own, of each shape of batches: a batch
of any size has them all, where a rank has up to 9 samples of a microbatch. Each takes what the
first compilation took, and code that stays in memory."""

_MOST_SETTLED = 64
"""Splits of batches that are not looked at again."""

_QUIET_S = 2.0
"""Compiling that takes no longer is not told of."""


class _Work(NamedTuple):
    """A program to compile: of a class and size, and whether it makes cheap ops again."""

    class_index: int
    size: Size
    recomputes: bool


class Reason(NamedTuple):
    """Why a class runs op by op, as a clause; and whether the compiler failed at it."""

    why: str
    is_compilers: bool = False


class CompiledSizes:
    """Compiles a rank's blocks. Mutable: sizes are met as batches come.

    With a `capture` classes that CUDA graphs hold run in them, each from its first run on. A class
    that one rank can't compile runs eagerly on all, of the sizes of that batch: ranks of a block
    exchange messages in one order.
    """

    def __init__(
        self,
        programs: Programs,
        graph: ModelGraph,
        plan: Plan,
        mesh: Mesh,
        stages: Sequence[int],
        compiler: Compiler,
        capture: Capture | None = None,
    ) -> None:
        """Compile the plan's own sizes of what `stages` run; all ranks call it.

        Raises PlanError where the compiler fails and the launch asked for compiled kernels.
        """
        self._programs, self._graph, self._plan, self._mesh = programs, graph, plan, mesh
        self._compiler, self._capture = compiler, capture
        self._forms = _forms(plan, graph, stages)
        self._apart: dict[int, Reason] = {}
        counts = {plan.stage_degrees(index).along("batch") for index in range(len(plan.stages))}
        self._counts = sorted(counts)
        self._others: list[tuple[int, Size]] = []
        self._seen: set[tuple[int, Size]] = set()  # in one batch alone
        self._settled: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()
        self._places: set[tuple[int, int, Size]] = set()
        self._failed: set[tuple[int, Size]] = set()  # (class, size), on any rank
        self._has_told = False
        sizes: list[Size] = []
        for bucket in range(len(programs.runs_whole)):
            self._places |= self._places_of(plan.split, bucket)
            sizes += programs.own_sizes(plan.split, bucket)
        # (The same on all ranks, whatever they have of a microbatch.)
        self._planned = {(count, size) for count, _, size in self._places}
        failed = self._compile(sizes, "")
        for class_index in failed:
            programs.run_eagerly(class_index)
        self._forms = [form for form in self._forms if form[0] not in failed]
        is_asked = os.environ.get(KERNELS) in ("compiled", "graphs")
        broken = [each.why for each in failed.values() if each.is_compilers]
        if is_asked and broken:
            raise PlanError(
                f"compiled `kernels` were asked for, and the compiler fails here: {broken[0]}; "
                "install what it lacks, or launch with eager `kernels`"
            )
        if failed:
            self._tell(f"eager kernels run in {_spelled(graph, failed)}")
        apart = {index: why for index, why in self._apart.items() if index not in failed}
        if apart:
            self._tell(f"no CUDA graphs hold {_spelled(graph, apart)}")

    def meet(self, bucket: int, split: BatchSplit) -> None:
        """Compile what a batch that is split so needs, ahead of its step; all ranks call it."""
        if (bucket, split.sizes) in self._settled:
            return
        places = self._places_of(split, bucket)
        left, is_settled = [], True
        for each in sorted({(count, size) for count, _, size in places}, reverse=True):
            if each in self._planned or each in self._others:
                continue
            count, size = each
            if sum((c, s.bucket) == (count, bucket) for c, s in self._others) == MOST_SIZES:
                left.append(size)
            elif each in self._seen:
                self._seen.remove(each)
                self._others.append(each)
            else:
                self._seen.add(each)
                is_settled = False
        if is_settled:
            if len(self._settled) == _MOST_SETTLED:
                self._settled.clear()
            self._settled.add((bucket, split.sizes))
        if left and not self._has_told:
            self._has_told = True
            self._tell(
                f"microbatches of {self._spelled_sizes(left)}, and further sizes, run op by op: "
                f"{MOST_SIZES} sizes beside the plan's are compiled (told once)"
            )
        held = self._planned.union(self._others)
        new = {place for place in places - self._places if (place[0], place[2]) in held}
        if new:
            self._places |= new
            self._compile_others(new)

    def _compile_others(self, new: Collection[tuple[int, int, Size]]) -> None:
        where = self._mesh.size("batch"), self._mesh.rank("batch")
        own = [size for *place, size in sorted(new, reverse=True) if tuple(place) == where]
        spelled = f"microbatches of {self._spelled_sizes([size for *_, size in new])}"
        failed = self._compile(own, f" for {spelled}")
        for class_index in failed:
            self._failed |= {(class_index, size) for *_, size in new}
            self._programs.run_eagerly(class_index, {size for *_, size in new})
        if failed:
            self._tell(f"eager kernels run in {_spelled(self._graph, failed)}, in {spelled}")

    def state_dict(self) -> dict[str, Any]:
        """Return which sizes batches have brought beside the plan's, for a training that goes on:
        to run the same kernels it compiles the same ones.
        """
        sizes = {"compiled": self._others, "seen": sorted(self._seen)}
        told = {name: [(c, tuple(s)) for c, s in each] for name, each in sizes.items()}
        return {"plan": self._plan_spelled(), **told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up these, under the plan by which they were met; they are compiled when met again.
        Under another plan nothing is taken up.
        """
        if state["plan"] != self._plan_spelled():
            return
        self._others = [(count, Size(*size)) for count, size in state["compiled"]]
        self._seen = {(count, Size(*size)) for count, size in state["seen"]}
        self._settled.clear()
        held = self._planned.union(self._others)
        gone = {place for place in self._places if (place[0], place[2]) not in held}
        self._places -= gone
        for class_index, _ in self._forms:
            self._programs.run_eagerly(class_index, {size for *_, size in gone})

    def _plan_spelled(self) -> str:
        plan, num_shapes = self._plan, len(self._programs.runs_whole)
        cut = plan.shares or self._counts
        return f"{plan.global_batch} in {plan.num_microbatches} on {cut}, {num_shapes} shapes"

    def _places_of(self, split: BatchSplit, bucket: int) -> set[tuple[int, int, Size]]:
        """Return the sizes of a batch's microbatches, by how many parts a stage has and which."""
        in_whole = self._programs.runs_whole[bucket]
        return {
            (count, number, size)
            for count in self._counts
            for number, size in places_of(split, bucket, count, in_whole=in_whole)
        }

    def _compile(self, sizes: Sequence[Size], spelled: str) -> dict[int, Reason]:
        """Compile all forms of these sizes; return the classes at which any rank failed."""
        # The largest first: ranks go from one to the next together.
        forms = sorted(self._forms, key=lambda form: -len(self._graph.classes[form[0]].ops))
        works = [_Work(form[0], size, form[1]) for form in forms for size in sizes]
        left = [each for each in works if (each.class_index, each.size) not in self._failed]
        found: dict[int, Reason] = {}
        began, done = time.monotonic(), 0
        names = [self._name_of(each) for each in left]
        while True:
            failed: dict[int, Reason] = {}
            if names and time.monotonic() - began > _QUIET_S:
                self._tell(
                    f"compiling blocks{spelled}, {done + 1} of {done + len(names)}: {names[0]}"
                )
            if left:
                work = left.pop(0)
                try:
                    self._compile_one(work)
                except (NotCompilable, CompilerFailed) as error:
                    failed[work.class_index] = Reason(str(error), isinstance(error, CompilerFailed))
            everywhere = self._told((failed, [self._name_of(each) for each in left]))
            for failures, _ in everywhere:
                found = {**failures, **found}
            left = [each for each in left if each.class_index not in found]
            names = max((each for _, each in everywhere), key=len)
            done += 1
            if not names:
                return found

    def _compile_one(self, work: _Work) -> None:
        launched = self._programs.compile(
            work.class_index,
            work.size,
            self._compiler,
            recomputes=work.recomputes,
            capture=self._capture,
        )
        if launched is not None:
            self._apart[work.class_index] = Reason(launched)

    def _told(self, own: tuple[dict[int, Reason], list[str]]) -> list[Any]:
        """Return what each rank says."""
        everywhere: list[Any] = [None] * dist.get_world_size(self._mesh.control)
        dist.all_gather_object(everywhere, own, group=self._mesh.control)
        return everywhere

    def _name_of(self, work: _Work) -> str:
        return self._graph.classes[work.class_index].name

    def _spelled_sizes(self, sizes: Collection[Size]) -> str:
        unit = self._plan.unit.size
        numbers = [n * unit for n in sorted({size.num_samples for size in sizes})]
        return f"{' and '.join(map(str, numbers))} sample{'s' * (numbers != [1])} a rank"

    def _tell(self, text: str) -> None:
        if self._mesh.global_rank == 0:
            print(f"planner: {text}", file=sys.stderr, flush=True)


def capture_of(plan: Plan, mesh: Mesh) -> Capture | None:
    """Return what captures a plan's blocks on this rank; None where its kernels are no graphs.

    Raises PlanError where there is no CUDA device.
    """
    if plan.kernels != "graphs":
        return None
    if mesh.device.type != "cuda":
        raise PlanError(
            f"the plan's `kernels` are graphs, which CUDA devices have, and this is "
            f"{mesh.device.type}; launch with compiled `kernels`"
        )
    return CudaCapture(mesh.device)


def _forms(plan: Plan, graph: ModelGraph, stages: Sequence[int]) -> list[tuple[int, bool]]:
    """Return (class, whether it makes cheap ops again in its backward) of what stages run."""
    forms: dict[tuple[int, bool], None] = {}
    for stage in (plan.stages[index] for index in stages):
        for block, choice in zip(stage.blocks, stage.recompute_by_block, strict=True):
            class_index = graph.blocks[block].class_index
            if choice == "selective":
                forms[class_index, True] = None
            if choice != "selective" or not stage.recompute_last:
                forms[class_index, False] = None
    return list(forms)


def _spelled(graph: ModelGraph, found: Mapping[int, Reason]) -> str:
    """Classes by the reason for which they stay eager, in words."""
    by_reason: dict[str, list[str]] = {}
    for class_index, reason in sorted(found.items()):
        by_reason.setdefault(reason.why, []).append(graph.classes[class_index].name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())

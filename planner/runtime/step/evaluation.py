"""Evaluation as ``model.eval()`` means it, by the stages of a plan.

The first time, rank 0 captures the model once more in evaluation mode, and all ranks lower its
blocks by the plan's layouts. Parameters are the stages' own; buffers too, but where replicas moved
them by their own samples: then those of the first replica, which `full_state_dict` returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from planner.language.across.cut.batch_statistics import BatchNorm, batch_norms
from planner.language.graph import ModelGraph, written_buffers
from planner.language.graph.evaluation import evaluation_graph
from planner.runtime.stage.programs import Programs
from planner.runtime.state.rank_state import RankState


class Evaluation:
    """What an engine runs in evaluation mode. Mutable: made when it is first needed.

    `capture` returns the model's graphs in evaluation mode, by shape of the batch, on every rank;
    None: they are those that the engine trains.
    """

    def __init__(
        self,
        state: RankState,
        training: Programs,
        programs_of: Callable[[Sequence[ModelGraph]], Programs],
        capture: Callable[[], tuple[ModelGraph, ...]] | None,
        *,
        has_deferred_statistics: bool,
    ) -> None:
        """`training` are the programs that blocks train by, `programs_of` lowers others for them;
        running statistics that are deferred are alike on all replicas.
        """
        self._state, self._training, self._programs_of = state, training, programs_of
        self._capture, self._are_alike = capture, has_deferred_statistics
        self._programs: Programs | None = None

    @property
    def programs(self) -> Programs:
        """The programs of the blocks. Raises PlanError for a model that has others in training."""
        if self._programs is None:
            self._programs = (
                self._training
                if self._capture is None
                else self._programs_of(
                    tuple(map(evaluation_graph, self._state.captured, self._capture()))
                )
            )
        return self._programs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, blocks run in evaluation mode."""
        state, programs = self._state, self.programs
        if programs is self._training:
            yield
            return
        changed: list[tuple[Any, Any]] = []
        moved: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        try:
            for index, stage in state.stages.items():
                first = state.plan.stages[index].first_block
                blocks: list[Any] = list(stage.blocks)
                for position, block in enumerate(blocks):
                    changed.append((block, block.programs))
                    class_index = state.graph.blocks[first + position].class_index
                    # The block stays: its parameters, FSDP2's hooks and shards are those of
                    # training.
                    block.programs = programs.of_class(class_index), None
                moved.append((stage.passed, dict(stage.passed)))
                stage.passed.update(self._of_first_replica(index))
            yield
        finally:
            for block, program in changed:
                block.programs = program
            for passed, before in moved:
                passed.update(before)

    def _of_first_replica(self, index: int) -> dict[str, Tensor]:
        """Return a stage's buffers that replicas move, as the first replica has them."""
        state = self._state
        group = state.mesh.group("data")
        if group is None or self._are_alike:
            return {}
        graph, passed = state.captured[0], state.stages[index].passed
        names = {name for norm in batch_norms(graph) for name in _running(norm)}
        for number in state.plan.stages[index].blocks:
            block = graph.blocks[number]
            program = graph.classes[block.class_index]
            known = dict(zip(program.params, block.params, strict=True))
            names.update(known[name] for name in written_buffers(program))
        found = {name: passed[name].clone() for name in sorted(names) if name in passed}
        # By name, so all ranks of the group broadcast in the same order.
        for tensor in found.values():
            dist.broadcast(tensor, group=group, group_src=0)
        return found


def _running(norm: BatchNorm) -> Iterator[str]:
    yield from (name for name in (norm.running_mean, norm.running_var) if name is not None)


def reads_mode(module: nn.Module) -> bool:
    """Whether a module may compute something else after ``eval()``: it, or a part of it, reads
    ``training``, as far as its source says.
    """
    return any(_source_reads_mode(kind) for kind in {type(part) for part in module.modules()})


def _source_reads_mode(kind: type) -> bool:
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            return True
        if "training" in source:
            return True
    return False

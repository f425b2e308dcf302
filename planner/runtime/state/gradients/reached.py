"""Parameters that nothing of a step reached: the weights of an expert that no sample chose.

In one process such a parameter has no gradient, and an optimizer passes it over: no decay, no
moments. Which parameters that are depends on values, so ranks find out after each step. It
concerns parameters that nothing uses but modules called as they are, and loops that pass over
experts without rows; others always have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.language.layout.axes import EXPERT_DATA, lowered_axes
from planner.language.layout.placements import Placements
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.stage import StageModule
from planner.runtime.state.to_device import to_device


class Reached:
    """What the backwards of a rank's stages reach. Mutable: it fills while a step runs."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        mesh: Mesh,
        of_stages: Iterable[Iterable[str]],
        placements: Mapping[str, Placements],
    ) -> None:
        """`of_stages` are the parameters of every stage of the model, `placements` those of this
        rank's, by the user's names.
        """
        self._stages, self._mesh = stages, mesh
        users = Counter(fqn for fqns in of_stages for fqn in set(fqns))
        # Ranks of ep may have parameters of their own, which others do not look for.
        self._names: dict[str, list[str]] = {"data": [], EXPERT_DATA: []}
        for stage in stages.values():
            for fqn in stage.may_be_unreached():
                if users[fqn] == 1:
                    self._names[placements[fqn].replicas].append(fqn)

    def begin(self) -> None:
        """Forget what was reached."""
        for stage in self._stages.values():
            stage.forget_reached()

    def missing(self) -> frozenset[str]:
        """Return the parameters that no replica's backward has reached since `begin`.

        Every rank of the stages calls it, at the same time.
        """
        here = {fqn for stage in self._stages.values() for fqn in stage.reached()}
        return frozenset(
            name
            for replicas, names in self._names.items()
            for name, is_reached in zip(
                sorted(names), self._any(sorted(names), here, replicas), strict=True
            )
            if not is_reached
        )

    def _any(self, names: list[str], here: set[str], replicas: str) -> list[int]:
        """Return for each name whether a backward came to it on any rank that has it."""
        if not names:
            return []
        # A replica whose samples chose other experts has other gradients, and so has a rank that
        # routes rows of its own: a parameter counts as reached where any of their backwards came to
        # it.
        found = to_device(
            torch.tensor([name in here for name in names], dtype=torch.int32), self._mesh.device
        )
        whole = {axis.name for axis in lowered_axes() if not axis.whole_params}
        for name in (replicas, *sorted(whole if replicas == "data" else {"etp"})):
            group = self._mesh.group(name)
            if group is not None:
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        if isinstance(found, FakeTensor):  # in a dry run, which has no values
            return [1] * len(names)
        return found.tolist()


@contextmanager
def without_gradients(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters have no gradient."""
    kept = [(param, param.grad) for param in params]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad

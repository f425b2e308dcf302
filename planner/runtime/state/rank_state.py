"""What a rank holds of a training between steps, and how it is brought together or changed.

The engine's step, checkpoints, first values, averages and proofs work on this record; none of them
takes the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.placements import Placements
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.randomness import RandomStream
from planner.runtime.stage.stage import StageModule
from planner.runtime.state import zero
from planner.runtime.state.gather import gather
from planner.runtime.state.trained import TrainedParams
from planner.runtime.state.users_module.outside import OutsideTensors


class Reader(Protocol):
    """What reads tensors of the model beside the stages, from copies of its own: preambles, and
    what is made of whole batches.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The copies, by names in the graph."""

    def take_values(self, values: Mapping[str, Tensor]) -> None:
        """Take other values, by names in the graph; those that are not there stay."""


@dataclass(slots=True)
class Averages:
    """Averages of trained parameters over steps. Mutable: they move with updates.

    Attributes:
        tensors: by the parameter's name, one for each stage of the rank that has it.
        count: of how many updates they are.
    """

    tensors: dict[str, list[Tensor]]
    count: Tensor

    def begin_anew(self) -> None:
        """Take the next weights as the first: those averaged so far are of another training."""
        self.count.zero_()


@dataclass(kw_only=True, eq=False)
class RankState:
    """What a rank holds of a training. Mutable: weights, the optimizer's state, counts.

    Attributes:
        plan, mesh: what is trained how, and this rank's process groups.
        graph: the graph that stages run.
        captured: the graphs of the plan's shapes of batches as captured, the largest first.
        modules: the classes of the model's modules, by name.
        stages: this rank's stage modules, by stage index.
        placements: where this rank's parameters and buffers lie, by names in the graph.
        zero_stage: of the plan; 0 where there is one replica.
        trained: what is trained of the stages, and its gradients.
        outside: the tensors of the state dict that lie in no stage.
        readers: what reads tensors beside stages, each with the graph that names them.
        random: the stream of random numbers; None for a model that draws none.
        optimizer: over this rank's parameters; None when it holds none that train.
        averages: of weights, once they are averaged.
        steps, samples: how many updates were made, and of how many samples.
    """

    plan: Plan
    mesh: Mesh
    graph: ModelGraph
    captured: tuple[ModelGraph, ...]
    modules: Mapping[str, type[nn.Module]]
    stages: dict[int, StageModule]
    placements: Mapping[str, Placements]
    zero_stage: int
    trained: TrainedParams
    outside: OutsideTensors
    readers: tuple[tuple[ModelGraph, Reader], ...]
    random: RandomStream | None
    optimizer: torch.optim.Optimizer | None = None
    averages: Averages | None = None
    steps: int = 0
    samples: int = 0

    def drawn(self) -> AbstractContextManager[None]:
        """Inside, random numbers are those of the next step; each step is run in it, once."""
        return nullcontext() if self.random is None else self.random.drawn()

    def rest(self) -> None:
        """Hold parameters as they are between steps: as shards, where ZeRO shards them."""
        if self.zero_stage:
            for stage in self.stages.values():
                zero.rest(stage)

    def take_values(self) -> None:
        """Bring new values of what the optimizer steps on, and of buffers, to all that use them."""
        self.trained.write_back()
        # Buffers that are read beside stages are copies of those in the state dict.
        names = {t.fqn: t.name for t in self.graph.tensors if t.kind == "buffer"}
        outside = self.outside.tensors
        values = {names[fqn]: t for fqn, t in outside.items() if fqn in names}
        for _, reader in self.readers:
            reader.take_values(values)

    def is_empty(self, fqn: str) -> bool:
        """Whether a tensor was on the meta device when the plan was applied: without values."""
        return fqn in self.outside.empty

    def pieces(self) -> Callable[[TensorMeta], tuple[Tensor, Placements]]:
        """Return what gives this rank's piece of a tensor, of a parameter what the optimizer steps
        on, and where it lies.
        """
        # (Looked up once: for each parameter anew it would take as long as their number squared.)
        stepped = self.trained.stepped_by_name()

        def piece(meta: TensorMeta) -> tuple[Tensor, Placements]:
            placements = self.placements[meta.name]
            if meta.kind == "param":
                return stepped[meta.fqn][0], placements
            passed = (stage.passed for stage in self.stages.values())
            return next(held[meta.name] for held in passed if meta.name in held), placements

        return piece

    def gathered(
        self,
        wanted: Iterable[TensorMeta],
        piece: Callable[[TensorMeta], tuple[Tensor, Placements]],
    ) -> dict[str, Tensor]:
        """Return whole tensors from pieces (`planner.runtime.state.gather`)."""
        return gather(self.graph, self.plan, self.mesh, wanted, piece)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on rank 0's CPU; {} elsewhere.

        Every rank calls it. Names are the user's, a tied parameter under each of its names.
        With precision "bf16" or "fp16" the values are the fp32 copies that the optimizer trains.
        """
        self.rest()
        wanted = [t for t in self.graph.tensors if t.kind in ("param", "buffer")]
        held = self.gathered(wanted, self.pieces())
        # What no stage holds comes from the module; what stages hold is gathered.
        whole = self.outside.unused | held
        if not held:
            return {}
        # A parameter that never trains may rest in a shorter dtype than the user's.
        return {
            name: whole[name].to(torch.promote_types(dtype, whole[name].dtype))
            for name, dtype in self.outside.dtypes.items()
        }

    def held_states(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of this rank's pieces, by the parameters' names."""
        self.rest()
        state = {} if self.optimizer is None else self.optimizer.state
        named = self.trained.optimized_by_name()
        return {fqn: state[copies[0]] for fqn, copies in named.items() if copies[0] in state}

"""What rank 0 tells all ranks to do with a taken model, and how they begin."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.capture.export import meta_copy
from planner.errors import PlanError
from planner.integrations.script.optimizer import StateAway
from planner.integrations.script.ranks import Ranks, Variables
from planner.language.graph.batch import unflatten_batch
from planner.language.plan import Plan
from planner.runtime.apply import apply_plan
from planner.runtime.checkpoint.optimizer_state import whole_states
from planner.runtime.initial.places import take_first_values
from planner.runtime.initial.values import ModuleValues
from planner.runtime.step.engine import Engine

_OWN = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Options of param groups that say how an update is computed: the engine's own stay."""


class Commands:
    """A rank's engine, by the commands that rank 0 gives all ranks alike."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """`optimizer` is the engine's; `model` one on the meta device."""
        self.engine, self._optimizer, self._model = engine, optimizer, model

    def add(
        self, leaves: Mapping[str, Tensor], fetch: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train on a batch without an update; return its loss, and what modules returned."""
        loss = self.engine.add(self._batch(leaves), fetch=fetch)
        return loss, self.engine.fetched

    def forward(self, leaves: Mapping[str, Tensor], fetch: Sequence[str]) -> dict[str, Tensor]:
        """Return what modules return for a batch in training; raise PlanError where that draws
        random numbers: it would not be what they returned before.
        """
        if self.engine.is_random:
            raise PlanError(
                "the script reads what the model returned in training, behind its backward; the "
                "model draws random numbers, so it can't be computed once more: read it in the "
                "first step, too"
            )
        return self.engine.intermediates(self._batch(leaves), fetch)

    def evaluate_loss(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch in evaluation mode.

        A mean over fewer samples than the plan can cut is that of each of them several times.
        """
        plan = self.engine.plan
        samples = self.engine.samples_of(self._batch(leaves))
        if samples < plan.least_batch and self.engine.has_mean_loss and plan.unit.runs == 1:
            rows = [*range(samples)] * -(-plan.least_batch // samples)
            leaves = {path: self._rows(tensor, rows, samples) for path, tensor in leaves.items()}
        return self.engine.evaluate(self._batch(leaves))

    def evaluate(self, leaves: Mapping[str, Tensor], fetch: Sequence[str]) -> dict[str, Tensor]:
        """Return what modules return for a batch in evaluation mode, of however many samples: the
        plan cuts those that make whole batches of it, the last filled up.
        """
        plan = self.engine.plan
        samples = self.engine.samples_of(self._batch(leaves))
        found: dict[str, list[Tensor]] = defaultdict(list)
        for first in range(0, samples, plan.global_batch):
            count = min(plan.global_batch, samples - first)
            wanted = max(count, plan.least_batch)
            rows = [first + place % count for place in range(wanted)]
            part = {path: self._rows(t, rows, samples) for path, t in leaves.items()}
            self.engine.evaluate(self._batch(part), fetch=fetch)
            for name, tensor in self.engine.fetched.items():
                found[name].append(_first(tensor, count, wanted))
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0]
                for name, parts in found.items()}  # fmt: skip

    def _rows(self, tensor: Tensor, rows: Sequence[int], samples: int) -> Tensor:
        if not tensor.dim() or tensor.shape[0] % samples or list(rows) == list(range(samples)):
            return tensor
        each = tensor.shape[0] // samples
        return tensor.unflatten(0, (samples, each))[list(rows)].flatten(0, 1)

    def finish(self, factor: float) -> None:
        """Sum gradients over ranks."""
        self.engine.finish_gradients(factor=factor)

    def clip(self, max_norm: float) -> Tensor:
        """Clip gradients; return their norm before."""
        return self.engine.clip(max_norm)

    def update(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Update the weights, by the options that the script's param groups have now."""
        for group, given in zip(self._optimizer.param_groups, options, strict=True):
            group.update({name: v for name, v in given.items() if name not in _OWN})
        self.engine.update()

    def forget(self) -> None:
        """Let go of gradients."""
        self.engine.forget_gradients()

    def state(self) -> dict[str, Tensor]:
        """Return the whole model's values, on rank 0."""
        return self.engine.full_state_dict()

    def load(self, values: Mapping[str, Tensor] | None) -> None:
        """Take values of the model, of which rank 0 has all."""
        held = chain(
            self._model.named_parameters(remove_duplicate=False),
            self._model.named_buffers(remove_duplicate=False),
        )
        filled = _Filled(
            {
                name: values[name].to(t.dtype)
                if values is not None and name in values
                else torch.empty(t.shape, dtype=t.dtype)
                for name, t in held
            }
        )
        take_first_values(self.engine.state, ModuleValues(filled.module, self.engine.mesh))
        self.engine.state.take_values()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of whole parameters by name, on rank 0."""
        return whole_states(self.engine.state)

    def _batch(self, leaves: Mapping[str, Tensor]) -> Any:
        return unflatten_batch(self.engine.plan.model.batch_tree, leaves)


class _Filled:
    """A module that has only tensors, by their paths."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.module = nn.Module()
        for name, tensor in tensors.items():
            owner = self.module
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            owner.register_buffer(last, tensor)


def begin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: nn.Module,
    plan: Plan,
    variables: Variables,
) -> Ranks:
    """Make the engine of a script's model, on all ranks; rank 0 alone returns from it. `trained` is
    the model with its loss.

    The script's optimizer stays the script's: it has the model's parameters, without values, and
    its options are the engine's at each update.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    held = [[names[id(param)] for param in g["params"] if id(param) in names]
            for g in optimizer.param_groups]  # fmt: skip
    on_meta = meta_copy(model)
    with variables.given():
        own = _beside(optimizer)
        engine = apply_plan(plan, trained, optimizer=own)
        ranks = Ranks()
        _refuse_unlike(model, own)
    now = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [now[name] for name in of_group]
    optimizer.state = StateAway()  # type: ignore[assignment]
    ranks.target = Commands(engine, own, on_meta)
    if variables.rank:
        variables.restore()
        ranks.follow()
    return ranks


def _beside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options over the same parameters."""
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    for name in ("step", "zero_grad"):  # (a scheduler's count of steps)
        vars(made).pop(name, None)
    made.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict, optimizer.state)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(made, name, copy.copy(getattr(optimizer, name)))
    return made


def _refuse_unlike(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError where ranks have made different models or optimizers."""
    own = (
        type(model).__qualname__,
        [(name, tuple(param.shape)) for name, param in model.named_parameters()],
        type(optimizer).__qualname__,
        len(optimizer.param_groups),
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise PlanError(
                f"rank {rank} has built another model or optimizer than rank 0: what the script "
                "does before its first training step depends on the process (random numbers "
                "without a seed, files); make it the same in each"
            )


def _first(tensor: Tensor, count: int, filled: int) -> Tensor:
    """Return the first samples of what was computed for batches that were filled up."""
    if count == filled or not tensor.dim() or tensor.shape[0] % filled:
        return tensor
    return tensor[: tensor.shape[0] // filled * count]

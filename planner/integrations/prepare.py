"""A loop of forward, backward and `optimizer.step()`, run by a plan: `planner.prepare`.

    model, optimizer, loader, scheduler = planner.prepare("plan.json", model, optimizer, loader,
                                                          scheduler)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

A call of the model in training mode is `Engine.step`: forward, backward and, at the last of
`accumulate` calls, the update. `backward`, `zero_grad` and `optimizer.step` find it done; they say
where the loop does not count as `accumulate` does, or would train on another multiple of the loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from planner.errors import PlanError
from planner.language.graph.batch import flatten_batch, unflatten_batch
from planner.language.plan import Plan
from planner.runtime.apply import apply_plan
from planner.runtime.batches.loader import Loader
from planner.runtime.batches.sampler import OwnPart
from planner.runtime.step.engine import Engine


class Loss(Tensor):
    """A mean loss, whose backward was done; also ``.loss`` of itself, as of a model's output."""

    @staticmethod
    def of(value: Tensor) -> Loss:
        """Return a loss with this value."""
        return Tensor._make_subclass(Loss, value.detach(), True)

    @property
    def loss(self) -> Tensor:
        """Itself."""
        return self

    def __getitem__(self, key: Any) -> Any:
        """Return itself as ``["loss"]`` or ``[0]``, as outputs of Hugging Face have it."""
        return self if key in ("loss", 0) else super().__getitem__(key)


class PreparedLoader:
    """The own parts of this replica, in the structure of the loader's batches.

    The engine moves what it reads to the device. A tensor that no stage of this rank reads is None.
    """

    def __init__(self, engine: Engine, data: Any, options: Mapping[str, Any]) -> None:
        self.parts: Loader = engine.loader(data, **options)
        self._engine = engine
        self._last: OwnPart | None = None
        self._given: Any = None

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield a batch at a time, from the position in the pass on."""
        for part in self.parts:
            self._last = part
            self._given = self._structure() if part.batch is None else part.batch
            yield self._given

    def part_of(self, batch: Any) -> OwnPart:
        """Return the part that a batch is; raise PlanError where it is not the last that was given.

        A part of a batch that is taken for a whole one would train on some of the samples only.
        """
        given, _ = flatten_batch(self._given)
        called, _ = flatten_batch(batch)
        same = given.keys() == called.keys() and all(given[path] is called[path] for path in given)
        if self._last is None or not same:
            raise PlanError(
                "the model was called with another batch than the prepared loader gave last; give "
                "its tensors as they are (the engine moves them to the device), or prepare "
                "without a loader and give the whole batch on every rank"
            )
        return self._last

    def _structure(self) -> Any:
        """Return what a batch looks like to a rank that reads nothing of it: None for tensors."""
        model = self._engine.plan.model
        return unflatten_batch(model.batch_tree, {path: None for path, *_ in model.inputs})


class PreparedModel:
    """Calls of a model, trained or evaluated by an engine. Mutable: counts calls, has a mode."""

    def __init__(self, engine: Engine, loader: PreparedLoader | None, accumulate: int) -> None:
        self.engine, self.training = engine, True
        self._loader, self._accumulate = loader, accumulate
        self._calls = 0
        self._losses: list[Loss] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Train on a batch, or evaluate it; return its mean loss over all ranks.

        Raises PlanError where the optimizer's step was left out, or the batch is another one.
        """
        if bool(args) == bool(kwargs):
            raise PlanError(
                "a prepared model takes its batch by position or by name, as the plan's model file "
                "gives it; not in both ways, and not empty"
            )
        batch = kwargs or (args if len(args) > 1 else args[0])
        if not self.training:
            return Loss.of(self.engine.evaluate(batch))
        if self._calls == self._accumulate:
            raise PlanError(
                f"the model was called {self._calls + 1} times for one optimizer.step() and "
                f"accumulate={self._accumulate} was given; give planner.prepare how many calls the "
                "loop makes for one update"
            )
        if self._loader is not None:
            batch = self._loader.part_of(batch)
        loss = self.engine.step(batch, update=self._calls + 1 == self._accumulate)
        self._calls += 1
        self._losses.append(Loss.of(loss))
        return self._losses[-1]

    def end_update(self) -> None:
        """Count calls anew; raise PlanError where the loop updates before they are complete, or
        from other gradients than those of the mean loss.
        """
        if self._calls != self._accumulate:
            raise PlanError(
                f"optimizer.step() came after {self._calls} calls of the model in training mode "
                f"and accumulate={self._accumulate} was given; the update is made in the last of "
                "them"
            )
        # What a backward of the loop leaves at a loss is the factor that it has in the update.
        factors = [0.0 if loss.grad is None else loss.grad.item() for loss in self._losses]
        self._calls = 0
        self._losses.clear()
        other = next((f for f in factors if not isclose(f, 1 / self._accumulate, rel_tol=1e-2)), 0)
        if any(factors) and (other or not all(factors)):
            raise PlanError(
                f"the loop's backward takes {other:g} times the loss of a call, and the engine's "
                f"update is of the mean of {self._accumulate} calls "
                f"({1 / self._accumulate:g} times each); divide losses by `accumulate`, put other "
                "factors and terms into the model's own loss, and leave a GradScaler out"
            )

    def train(self, mode: bool = True) -> PreparedModel:
        """Train in calls from now on, or evaluate."""
        self.training = mode
        return self

    def eval(self) -> PreparedModel:
        """Evaluate in calls from now on; every rank gives the whole batch."""
        return self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the next update begins with gradients of its own. Raise PlanError where that
        is not made yet, so that gradients would be lost.
        """
        if 0 < self._calls < self._accumulate:
            raise PlanError(
                f"zero_grad() came after {self._calls} of {self._accumulate} calls of the model "
                "for an update, whose gradients the engine keeps; call it after optimizer.step(), "
                "and let a pass have a multiple of `accumulate` batches"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's values on rank 0's CPU, {} elsewhere; every rank calls it."""
        return self.engine.full_state_dict()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Raise PlanError: no rank has them all, and clipping is part of the step."""
        raise PlanError(
            "a prepared model has no parameters() of its own: they lie as the plan says; for "
            "clipping give planner.prepare `max_grad_norm`"
        )


class PreparedOptimizer:
    """An optimizer whose steps the engine makes. All else is the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: PreparedModel) -> None:
        self._optimizer, self._model = optimizer, model

    def step(self, closure: None = None) -> None:
        """Find the update made; raise PlanError where it was not, or for a closure."""
        if closure is not None:
            raise PlanError("optimizer.step(closure) evaluates the model in it; leave it out")
        self._model.end_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `PreparedModel.zero_grad`."""
        self._model.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def prepare(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: Any = None,
    scheduler: Any = None,
    *,
    accumulate: int = 1,
    loader_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[PreparedModel, PreparedOptimizer, PreparedLoader | None, Any]:
    """Return model, optimizer, loader and scheduler for a loop; see `planner.prepare`."""
    if accumulate < 1:
        raise PlanError(f"accumulate={accumulate} must be at least 1 call of the model an update")
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise PlanError("the DataLoader gives no batches; make it with a batch_size")
    engine = apply_plan(plan, model, optimizer=optimizer, **options)
    prepared_loader = None
    if loader is not None:
        prepared_loader = PreparedLoader(engine, loader, loader_options or {})
    prepared = PreparedModel(engine, prepared_loader, accumulate)
    return prepared, PreparedOptimizer(optimizer, prepared), prepared_loader, scheduler

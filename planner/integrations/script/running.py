"""Runs a script for one process on the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.errors import PlanError
from planner.integrations.script.finding import Finding, Found
from planner.integrations.script.ranks import Variables
from planner.integrations.script.stand_in import refuse_step, stand_in
from planner.integrations.script.taken import Loop
from planner.integrations.script.values.pending import Pending
from planner.integrations.script.values.snapshots import Snapshot
from planner.language.plan import Plan
from planner.runtime.state.users_module.away import given_values


class Running:
    """A script under way. Mutable: its loop, once the model was called in training."""

    def __init__(
        self,
        plan: Plan | None,
        variables: Variables,
        loop: Callable[[Found, Any, Variables], Loop] = Loop,
    ) -> None:
        """`loop` makes the loop of the model that is found."""
        self._plan, self._variables, self._make_loop = plan, variables, loop
        self.finding = Finding()
        self._loop: Loop | None = None
        self._depth = 0
        self.refused: PlanError | None = None
        """What was refused first: a script that catches it and goes on would train otherwise."""

    @property
    def has_loop(self) -> bool:
        """Whether the model was found."""
        return self._loop is not None

    @property
    def loop(self) -> Loop:
        """That of the model that was found."""
        assert self._loop is not None, "the model was found"
        return self._loop

    @property
    def is_hidden(self) -> bool:
        """Whether the script runs, and none of our own work."""
        return self._variables.are_hidden

    def calls(self, plain: Any) -> Any:
        """Return what stands for ``nn.Module.__call__``."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                if self._loop is None and (found := self.finding.found(module)):
                    self._begin(self._make_loop(found, self._plan, self._variables))
                if self._loop is not None and module is self._loop.model:
                    self.refuse_again()
                    output = self._loop.called(args, kwargs)
                    if output is not NotImplemented:
                        return output
            self._depth += 1
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def refuse_again(self) -> None:
        """Raise what was refused, where the script has caught it."""
        if self.refused is not None:
            raise self.refused

    def _begin(self, loop: Loop) -> None:
        self._loop = loop
        stand_in(loop)
        for optimizer in self.finding.optimizers:
            if optimizer is not loop.optimizer:
                refuse_step(loop, optimizer)

    def is_model(self, module: nn.Module) -> bool:
        """Whether a module is the model that the engine has, or will have."""
        return self._loop is not None and module is self._loop.model

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a part of the model that the engine has ("" of all of it)."""
        if self._loop is None or not self._loop.is_begun:
            return None
        parts = self._loop.model.named_modules()
        return next((name for name, part in parts if part is module), None)

    def has_any(self, values: Iterable[Any]) -> bool:
        """Whether there is a parameter of the found model, or what it returned."""
        if self._loop is None:
            return False
        own = {id(param) for param in self._loop.model.parameters()}
        return any(id(v) in own or isinstance(v, Pending) for v in values if isinstance(v, Tensor))

    def load(self, state: Any) -> Any:
        """Bring values of the whole model to the engine; return what `load_state_dict` does."""
        loop = self.loop
        expected = loop.command("state")
        missing, beyond = expected.keys() - state.keys(), state.keys() - expected.keys()
        if missing or beyond:
            raise RuntimeError(
                f"load_state_dict: missing {sorted(missing)}, unexpected {sorted(beyond)}"
            )
        values = {name: state[name].detach() for name in expected}
        # (A snapshot that is not late has what the engine has.)
        plain = {n: v.plain if isinstance(v, Snapshot) else v for n, v in values.items()}
        loop.command("load", {name: value.cpu() for name, value in plain.items()})
        return nn.modules.module._IncompatibleKeys([], [])

    @contextmanager
    def whole_models(self, saved: Any) -> Iterator[None]:
        """Inside, the model has its values if it is among what is saved."""
        with ExitStack() as given:
            if self._loop is not None and self._loop.is_begun:
                model = self._loop.model
                if any(leaf is model for leaf in tree_leaves(saved)):
                    given.enter_context(self._loop.without_left())
                    values = self._loop.command("state")
                    given.enter_context(given_values(model, values))
            yield

"""Seeds that a forward sets: a captured graph has its draws, and not what they are drawn from.

A forward that seeds a generator, or puts its state back, draws the same numbers in each step. The
graph would draw other ones, so such a forward is refused. What a backward or a constructor does to
generators is no part of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner.capture.diagnose import calling_line, is_users

_SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state",
            "set_rng_state_all")  # fmt: skip
_MODULES = ("torch", "torch.random", "torch.cuda", "torch.cuda.random", "torch.xpu",
            "torch.xpu.random", "torch.mps")  # fmt: skip
"""Where PyTorch has them; `fork_rng` calls these, too."""


class Seeds:
    """What a forward did to the default generators. Mutable: it is noted as it happens."""

    def __init__(self) -> None:
        self.set_by: str | None = None
        self._before = torch.initial_seed()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the first call inside that sets a generator; it sets it as ever."""
        before: list[tuple[Any, str, Any]] = []
        for module in filter(None, map(sys.modules.get, _MODULES)):
            for name in _SETTERS:
                setter = getattr(module, name, None)
                if setter is not None:
                    before.append((module, name, setter))
        try:
            for module, name, setter in before:
                setattr(module, name, self._noting(name, setter))
            yield
        finally:
            for module, name, setter in before:
                setattr(module, name, setter)
        # A generator's own method, or a function that was imported by its name.
        if self.set_by is None and torch.initial_seed() != self._before:
            self.set_by = "another seed"

    def _noting(self, name: str, setter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setter)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if self.set_by is None and _is_users_call():
                self.set_by = f"{name}{calling_line()}"
            return setter(*args, **kwargs)

        return noting


_BETWEEN = frozenset({torch.random.__file__, contextlib.__file__})
"""Files of `fork_rng`, which puts the state back when its block ends."""


def _is_users_call() -> bool:
    """Whether the user's code calls a setter: compilers and trials put back what they found."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)

"""Tests of whether a compiler runs are answered as in training, but where that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.capture.branches import Branches


def is_compiling() -> bool:
    """As libraries wrap it."""
    return torch.compiler.is_compiling()


def looks() -> None:
    raise LookupError("depends on values")


class Inner(nn.Module):
    def forward(self, told: list[str]) -> None:
        told.append("inner compiled" if is_compiling() else "inner")
        if not is_compiling():
            looks()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, told: list[str]) -> None:
        told.append("outer compiled" if is_compiling() else "outer")
        self.inner(told)


def run(branches: Branches, forward: Callable[[list[str]], None]) -> list[str]:
    told: list[str] = []
    branches.run(forward, told)
    return told


def failure(branches: Branches, forward: Callable[[list[str]], None]) -> LookupError:
    with pytest.raises(LookupError) as caught:
        run(branches, forward)
    return caught.value


def test_the_test_nearest_to_a_failure_alone_is_answered_as_for_a_compiler():
    branches = Branches()
    assert branches.turn(failure(branches, Outer()))
    assert run(branches, Outer()) == ["outer", "inner"]


def test_a_test_that_does_not_help_is_answered_as_in_training_again():
    """And a test outside the module that failed is left as it is: it may choose another model."""

    class Fails(Outer):
        def forward(self, told: list[str]) -> None:
            told.append("outer compiled" if is_compiling() else "outer")
            if is_compiling():
                raise AssertionError("answered as for a compiler")
            Always()(told)

    class Always(nn.Module):
        def forward(self, told: list[str]) -> None:
            seen.append(is_compiling())
            looks()

    seen: list[bool] = []
    branches = Branches()
    assert branches.turn(failure(branches, Fails()))
    assert not branches.turn(failure(branches, Fails()))
    failure(branches, Fails())
    assert seen == [False, True, False]


def test_libraries_take_no_tensor_for_a_tracers_and_torch_does():
    def forward(told: list[bool]) -> None:
        kind = torch._subclasses.FakeTensor
        told.extend(isinstance(each, kind) for each in (fake, torch.ones(1)))
        told.append(type(fake) in (int, kind) and issubclass(type(fake), kind))

    with FakeTensorMode():
        fake = torch.ones(1)
    told: list[bool] = []
    Branches().run(forward, told)
    assert told == [False, False, True]
    assert isinstance(fake, torch._subclasses.FakeTensor), "put back"
    with pytest.raises(LookupError):
        Branches().run(lambda: looks())
    assert not isinstance(torch._subclasses.FakeTensor, Branches)
    assert torch.compiler.is_compiling.__module__ == "torch.compiler"

"""A forward's tests of whether a compiler runs are answered as in training, but where that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
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


def run(branches: Branches, forward: Callable[[list[str]], None]) -> list[str] | BaseException:
    told: list[str] = []
    try:
        branches.run(forward, told)
    except LookupError as error:
        return error
    return told


def test_the_test_nearest_to_a_failure_alone_is_answered_as_for_a_compiler():
    branches = Branches()
    failed = run(branches, Outer())
    assert branches.turn(failed)
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

    branches, seen = Branches(), []
    assert branches.turn(run(branches, Fails()))
    assert not branches.turn(run(branches, Fails()))
    run(branches, Fails())
    assert seen == [False, True, False]


def test_libraries_take_no_tensor_for_a_tracers_and_torch_does():
    def forward(told: list[Tensor]) -> None:
        kind = torch._subclasses.FakeTensor
        told.extend(isinstance(each, kind) for each in (fake, torch.ones(1)))
        told.append(type(fake) in (int, kind) and issubclass(type(fake), kind))

    with FakeTensorMode():
        fake = torch.ones(1)
    told: list[Tensor] = []
    Branches().run(forward, told)
    assert told == [False, False, True]
    assert isinstance(fake, torch._subclasses.FakeTensor), "put back"
    with pytest.raises(LookupError):
        Branches().run(lambda: looks())
    assert not isinstance(torch._subclasses.FakeTensor, Branches)
    assert torch.compiler.is_compiling.__module__ == "torch.compiler"

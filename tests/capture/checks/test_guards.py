"""Conditions that only raise are passed; where more hangs on one, it is left to fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count

import pytest

from planner.capture.checks.guards import Compared, value_that_passes

NUMBER = count()


class Unknown:
    """A tensor whose values nobody has: what its truth is taken for is written down. Mutable."""

    def __init__(self) -> None:
        self.taken: list[object] = []

    def _told(self, frame) -> object:
        value = value_that_passes(frame)
        self.taken.append(value)
        if value is None:
            raise LookupError("depends on a tensor's values")
        return value

    def __bool__(self) -> bool:
        return bool(self._told(sys._getframe(1)))

    def item(self) -> object:
        return self._told(sys._getframe(1))

    def __gt__(self, other: object) -> Unknown:
        return self


class Captured:
    """What a capture calls a model by: what catches exceptions around it is not the model's."""

    def __init__(self) -> None:
        self._planner_tree = True

    def call(self, forward: Callable, x: Unknown) -> object:
        return forward(x)


@pytest.fixture
def run(tmp_path) -> Callable[[str], tuple[object, list[object]]]:
    """Run lines as the forward of a model; return its result and what `x` was taken for."""

    def of(body: str) -> tuple[object, list[object]]:
        path = tmp_path / f"model_{next(NUMBER)}.py"
        lines = "".join(f"    {each}\n" for each in body.strip().splitlines())
        path.write_text("from contextlib import suppress, nullcontext\n\n"
                        f"def forward(x, y=False):\n{lines}    return 'passed'\n")  # fmt: skip
        scope: dict[str, Callable] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        x = Unknown()
        try:
            return Captured().call(scope["forward"], x), x.taken
        except LookupError:
            return "left to fail", x.taken

    return of


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("if x > 3: raise ValueError", [False]),
        ("assert x > 3", [True]),
        ("if not x: raise ValueError", [True]),
        ("assert not x, 'text'", [False]),
        ("if x or x > 1: raise ValueError", [False, False]),
        ("if not (x and x): raise ValueError", [True, True]),
        ("if x and y: raise ValueError", [False]),
        ("assert y or x", [True]),
        ("if x:\n    text = str(3)\n    raise ValueError(text)", [False]),
        ("if x: raise ValueError\nelse: y = 3", [False]),
    ],
)
def test_a_condition_is_taken_for_what_raises_nothing(run, body, taken):
    assert run(body) == ("passed", taken)


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("if x.item() >= 3: raise ValueError", False),
        ("assert x.item() < 3", True),
        ("assert 3 != x.item()", True),
        ("if not x.item() == 3: raise ValueError", True),
    ],
)
def test_a_number_in_a_comparison_is_one_that_passes(run, body, passes):
    told, (number,) = run(body)
    assert told == "passed"
    assert isinstance(number, Compared)
    assert (number < 1) is (number == 1) is passes


@pytest.mark.parametrize(
    "body",
    [
        "if x: y = 3",
        "if x:\n    y += 1\n    raise ValueError",
        "if x:\n    if y: return 3\n    raise ValueError",
        "while x: raise ValueError",
        "y = 1 if x else 2",
        "if 1 < x.item() < 3: raise ValueError",
        "if x.item() is None: raise ValueError",
        "if x.item() + 1 > 3: raise ValueError",
        "y = bool(x)\nif y: raise ValueError",
    ],
)
def test_a_condition_on_which_more_hangs_is_left_to_fail(run, body):
    assert run(body) == ("left to fail", [None])


RAISES = "    if x: raise ValueError\n"


@pytest.mark.parametrize(
    "body",
    [
        f"try:\n{RAISES}except ValueError: return 3",
        # The model may go on from within a handler that raises in the end.
        f"try:\n{RAISES}except ValueError:\n    if not y: return 3\n    raise",
        f"try:\n{RAISES}except TypeError: raise\nexcept ValueError: pass",
        f"try:\n{RAISES}except ValueError: pass\nexcept TypeError: raise",
        f"try:\n{RAISES}except* ValueError: pass",
        f"with suppress(ValueError):\n{RAISES}",
    ],
)
def test_an_exception_that_may_be_of_use_is_left_to_fail(run, body):
    assert run(body) == ("left to fail", [None])


@pytest.mark.parametrize(
    "body",
    [
        f"try:\n{RAISES}except ValueError as error:\n    text = 'more'\n    raise TypeError(text)",
        f"try:\n{RAISES}finally: y = 3",
        f"try: y = 3\nexcept ValueError: pass\nelse:\n{RAISES}",
        f"with nullcontext():\n{RAISES}",
    ],
)
def test_an_exception_that_is_raised_again_ends_the_run_all_the_same(run, body):
    assert run(body) == ("passed", [False])


def test_a_caller_may_catch_too(run):
    inner = "def check():\n    if x: raise ValueError\n"
    assert run(f"{inner}check()") == ("passed", [False])
    caught = f"{inner}try: check()\nexcept ValueError: return 3"
    assert run(caught) == ("left to fail", [None])

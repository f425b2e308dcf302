"""N1: what computes across samples is named where it stands, and nothing else is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import pytest

from planner.capture.module import capture_module
from planner.language.across.walk import Finding, across_samples
from tests.across import constructs
from tests.across.constructs import ACROSS, ALONE, MADE_WHOLE, NAMED_ALL_THE_SAME, Body, batch
from tests.referees.batches import cutting_changes, gap_of_engine, used_parts

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")

QUICK = 3
"""Every so many bodies are looked at in the quick tests, all in the slow ones."""


def _some(bodies: Iterable[Body]) -> list[Any]:
    return [
        pytest.param(body, marks=() if index % QUICK == 0 else pytest.mark.slow)
        for index, body in enumerate(bodies)
    ]


ROUNDING = 1e-9
ROUNDING_IN_BF16 = 0.02


def named_in(body: Body) -> tuple[Finding, ...]:
    return across_samples(capture_module(used_parts(body), batch(2), batch(3)))


@pytest.mark.parametrize("body", _some(ALONE), ids=lambda body: body.__name__)
def test_samples_alone(body: Body):
    """N1: parts learn what the whole batch does, and nothing is named."""
    in_bf16 = "bfloat16" in inspect.getsource(body)
    assert cutting_changes(used_parts(body)) < (ROUNDING_IN_BF16 if in_bf16 else ROUNDING)
    assert named_in(body) == ()


@pytest.mark.parametrize("body", _some(ACROSS), ids=lambda body: body.__name__)
def test_across_samples(body: Body):
    """N1: parts learn something else, and the user's own line is named with its kind."""
    if body is not constructs.filled_queue:  # of which nothing is learnt in the same step
        assert cutting_changes(used_parts(body)) > 1e-3
    findings = named_in(body)
    assert tuple(dict.fromkeys(finding.kind for finding in findings)) == ACROSS[body]
    assert any(_lines(body) & _lines_of(finding) for finding in findings)


@pytest.mark.parametrize("body", _some(MADE_WHOLE), ids=lambda body: body.__name__)
def test_made_of_the_whole_batch(body: Body):
    """B2: the mean of parts is another loss; the engine's parts add up to the whole batch's."""
    model = used_parts(body)
    assert cutting_changes(model) > 1e-3
    assert named_in(body) == ()
    assert gap_of_engine(model, parts=2) < ROUNDING
    assert gap_of_engine(model, parts=3) < ROUNDING


@pytest.mark.parametrize("body", NAMED_ALL_THE_SAME, ids=lambda body: body.__name__)
def test_named_without_harm(body: Body):
    """N1: what is named in vain is listed, with the reason."""
    assert cutting_changes(used_parts(body)) < ROUNDING
    assert named_in(body) != ()


def _lines(body: Body) -> set[int]:
    """The lines of a body and of the functions here that it calls."""
    calls = set(re.findall(r"\b\w+(?=\()", inspect.getsource(body)))
    functions = [body, *(f for n in calls if inspect.isfunction(f := vars(constructs).get(n)))]
    found: set[int] = set()
    for function in functions:
        code, first = inspect.getsourcelines(function)
        found.update(range(first, first + len(code)))
    return found


def _lines_of(finding: Finding) -> set[int]:
    return {int(n) for n in re.findall(r"across/constructs\.py:(\d+): `", finding.line)}

"""N1: random bodies; where cutting the batch changes gradients, something is named."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch

from planner.capture.module import capture_module
from planner.errors import CaptureError
from planner.language.across.walk import across_samples
from tests.across.constructs import batch
from tests.across.random_bodies import random_body
from tests.referees.batches import cutting_changes, gap_of_engine, used_parts


def outcomes(seeds: range) -> Counter[tuple[bool, bool]]:
    """Count (cutting changes gradients, something is named); fail where an engine's parts differ
    in silence.
    """
    example = batch(8, torch.float64)
    found: Counter[tuple[bool, bool]] = Counter()
    for seed in seeds:
        body, names = random_body(seed, example)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a variance of one sample is none
                model = used_parts(body)
                gap = cutting_changes(model)
        except (RuntimeError, IndexError):
            continue  # not for every size of the batch
        if not math.isfinite(gap) or gap == 0.0 or 1e-10 < gap < 1e-6:
            continue  # nor without a gradient, nor what is a matter of rounding
        try:
            graph = capture_module(model, batch(2), batch(3))
        except CaptureError:
            continue
        findings = across_samples(graph)
        changes = gap > 1e-6
        if changes and not findings:
            # Parts count otherwise than by their samples, or take values of the whole batch.
            gap = gap_of_engine(model, parts=3)
            assert gap < 1e-9, f"seed {seed}: {names} differ by {gap:.1e} in silence"
            continue
        found[changes, bool(findings)] += 1
    return found


def check(found: Counter[tuple[bool, bool]]) -> None:
    """Both kinds are there, and few bodies are named in vain (x - x, one number's variance)."""
    differ, alone, vain = found[True, True], found[False, False], found[False, True]
    assert differ > 2 * vain
    assert alone > vain


def test_nothing_in_silence():
    check(outcomes(range(12)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 50))
def test_nothing_in_silence_among_many(first: int):
    check(outcomes(range(first, first + 50)))

"""How odds of fitting are held against runs that ran or crashed."""

from math import exp

import numpy as np
import pytest

from benchmarks.published.odds import (
    EndedRun,
    needed_over_live,
    other_crashes,
    reliability,
)

MIDDLE, WITHIN, OTHER = 0.2, 0.1, 0.1


def runs_of(layers: int, middle: float, count: int = 4000) -> list[EndedRun]:
    """Runs that need exp(N(middle, 0.1)) times their live tensors, a tenth of which crash for
    something else; odds that are told are right.
    """
    draw = np.random.default_rng(layers)
    found = []
    for number in range(count):
        is_far = number % 4 == 0
        room = 3.0 if is_far else exp(draw.uniform(-0.2, 0.6))
        fits = np.log(room) >= draw.normal(middle, WITHIN)
        crashes = draw.random() < OTHER
        found.append(
            EndedRun(
                layout=(layers, number),
                layers=layers,
                ran=bool(fits and not crashes),
                is_far=is_far,
                room=room,
                odds=float(np.mean(np.log(room) >= draw.normal(middle, WITHIN, 500))),
            )
        )
    return found


def test_crashes_far_from_full_are_taken_off():
    runs = runs_of(8, MIDDLE)
    assert other_crashes(runs)[8] == pytest.approx(OTHER, abs=0.02)
    for line in reliability(runs):
        if line["odds_from"] in (0.5, 0.7, 0.85) and line["odds_to"] < 1:
            assert line["fit_pct"] == pytest.approx(line["odds_pct"], abs=6)
            assert line["ran_pct"] < line["fit_pct"]


def test_models_that_differ_widen_what_is_needed():
    """Two models 0.3 apart: hypot(0.1, 0.3 / sqrt(2) * sqrt(1.5)), a tenth of Student's t beyond
    1.28 of it.
    """
    alike = needed_over_live(runs_of(8, MIDDLE))
    assert alike[0] == pytest.approx(exp(MIDDLE), rel=0.02)
    apart = needed_over_live(runs_of(8, MIDDLE) + runs_of(9, MIDDLE + 0.3))
    scale = 1.6377 / 1.2816 / 3**0.5
    assert alike[1] == pytest.approx(WITHIN * scale, rel=0.15)
    assert apart[1] == pytest.approx(np.hypot(WITHIN, 0.3 * 0.75**0.5) * scale, rel=0.1)

"""Random models under random placements, values and gradients against one device."""

from __future__ import annotations

import random

import pytest

from planner.language.lowering.propagate import propagate_layout
from tests.sharding.programs import check_lowered
from tests.sharding.random_layouts import random_layout
from tests.sharding.random_programs import random_program


def fuzz(seed: int) -> None:
    """One case; the seed alone brings it back."""
    program = random_program(seed)
    axis_size = 2 if seed % 4 else 3
    check_lowered(program, random_layout(program, random.Random(seed), axis_size), axis_size, seed)
    layout = propagate_layout(0, program, axis_size)
    check_lowered(program, layout, axis_size, seed, recompute=True)


@pytest.mark.parametrize("seed", range(25))
def test_random_model_under_random_placements(seed):
    """G5, M10, M12, X13: no mismatch, nor where random ops are made again in the backward;
    `python -m benchmarks fuzz` runs more.
    """
    fuzz(seed)

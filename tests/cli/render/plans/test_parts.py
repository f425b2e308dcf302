"""Parts of a step and of memory: shares that add up, the slowest rank, and how sure it is."""

from __future__ import annotations

import pytest
from rich.console import Console

from commands.render.flags import with_flags
from commands.render.plans.parts import (
    MEMORY_COLUMNS,
    MOST_ROWS,
    WIDE,
    StepParts,
    _bar,
    bottleneck_line,
    bottleneck_words,
    memory_cells,
    memory_digits,
    memory_range,
    memory_table,
    memory_warning,
    ranks_shown,
    stage_name,
)
from planner.units import GIB
from search.report.words import MEMORY_WORDS


def shown(renderable, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as told:
        console.print(renderable)
    return told.get()


SECONDS = {"compute_s": 0.75, "tp_comm_s": 0.2496, "inputs_s": 0.0001, "clipping_s": 0.0003}


def test_parts_of_a_step_have_shares_and_small_ones_are_put_together():
    lines = shown(StepParts(SECONDS)).splitlines()
    (compute,) = [line for line in lines if line.startswith("compute")]
    assert "750 ms" in compute
    assert "75.0%" in compute
    assert "forward and backward" in compute
    (rest,) = [line for line in lines if line.startswith("the rest")]
    assert "400 us" in rest
    assert "inputs, gradient clipping" in rest


def test_a_narrow_screen_has_the_figures_without_explanations():
    told = shown(StepParts(SECONDS), WIDE - 1)
    assert "75.0%" in told
    assert "forward and backward" not in told


def test_a_bar_is_as_long_as_its_share_and_never_nothing():
    assert [len(_bar(share)) for share in (1.0, 0.5, 0.0001)] == [20, 10, 1]
    assert _bar(0.5) == "█" * 10
    assert _bar(0.5 + 1 / 160) == "█" * 10 + "▏"


def test_the_slowest_rank_is_named_with_what_even_stages_would_save():
    words = bottleneck_words(
        {"compute_s": 0.8, "imbalance_s": 0.2}, pp_rank=3, work_s=0.9,
        stages=(stage_name(3, 6, 8), stage_name(7, 9, 9)),
    )  # fmt: skip
    assert words == (
        "pp rank 3 (stage 3, blocks 6..8; stage 7, block 9) works 90.0% of the step; with even "
        "stages it would work 200 ms (20.0%) less"
    )
    even = {"compute_s": 1.0, "imbalance_s": 0.001}
    assert "as long" in bottleneck_words(even, pp_rank=0, work_s=1.0, stages=())
    assert bottleneck_line("so").plain == "Bottleneck: so"


def test_a_table_shows_the_ends_and_the_rank_that_matters():
    assert ranks_shown(MOST_ROWS, 0) == list(range(MOST_ROWS))
    assert ranks_shown(20, 9) == [0, 1, 2, 3, 9, 16, 17, 18, 19]
    assert ranks_shown(20, 2) == [0, 1, 2, 3, 16, 17, 18, 19]


def test_columns_of_memory_hold_each_part_once():
    """In GiB they add up to the total; a file of before may lack a part."""
    parts = [part for name, names in MEMORY_COLUMNS for part in names if name != "total"]
    assert sorted(parts) == sorted(MEMORY_WORDS)
    held = {name: (place + 1) * GIB for place, name in enumerate(MEMORY_WORDS)}
    held["total_bytes"] = sum(held.values())
    cells = [float(cell) for cell in memory_cells(held, 1)]
    assert sum(cells[:-1]) == cells[-1] == 45
    assert memory_cells({"parameter_bytes": GIB // 2}, 3)[0] == "0.500"


def test_small_memory_has_more_decimals():
    assert [memory_digits(gib * GIB) for gib in (3, 4, 5)] == [3, 3, 1]


def test_ranks_left_out_of_a_table_are_counted():
    memory = [{"total_bytes": GIB * (1 + (rank == 9))} for rank in range(20)]
    lines = [line.split() for line in shown(memory_table(memory)).splitlines()]
    assert [line[:2] for line in lines if "more" in line] == [["⋮", "5"], ["⋮", "6"]]
    (fullest,) = [line for line in lines if line and line[0] == "9"]
    assert fullest[-1] == "2.000"
    assert "GiB" in shown(memory_table(memory))


def test_memory_is_told_with_its_range():
    told = memory_range(2.0 * GIB, 3.0 * GIB, "dry runs")
    assert told == "2.00 GiB to 3.00 GiB in 4 of 5 cases, from dry runs"


@pytest.mark.parametrize("high", [5.0, 8.0])
def test_memory_that_can_hardly_pass_its_limit_is_not_warned_of(high):
    assert memory_warning(4.0 * GIB, high * GIB, 8.0 * GIB) == ""


def test_a_warning_names_the_limit_under_which_the_range_fits():
    """It may be 10/8 of what is predicted: under 8 * 8/10 GiB the high end is within 8."""
    told = memory_warning(8.0 * GIB, 10.0 * GIB, 8.0 * GIB)
    assert "has 8.00 GiB and needs more than 10.00 GiB in one case of ten" in told
    assert with_flags(told).endswith("search with --memory-limit 6.4")
    told = memory_warning(1600.0 * GIB, 1602.0 * GIB, 1600.0 * GIB)
    assert with_flags(told).endswith("--memory-limit 1590")


def test_a_limit_that_a_warning_names_is_low_enough():
    """79.11 * 78.86 / 81.56 is 76.49: a plan of 76.5 could pass 79.11 GiB."""
    told = with_flags(memory_warning(78.86 * GIB, 81.56 * GIB, 79.11 * GIB))
    assert told.endswith("--memory-limit 76.4")

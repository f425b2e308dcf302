"""A plan's choices in a line."""

from __future__ import annotations

from planner.language.plan.spelled import spell_choices, spell_degrees


def test_sizes_of_one_are_left_out():
    assert spell_degrees({"dp": 4, "tp": 1, "pp": 2}) == "dp 4 x pp 2"
    assert spell_degrees({"dp": 1, "tp": 1}) == "one device"


def test_a_schedule_is_told_of_a_pipeline_alone():
    told = spell_choices({"dp": 2, "pp": 4}, 2, (8, 1), "interleaved_1f1b", 1, "none")
    assert told == (
        "dp 2 x pp 4, vpp 2, 8 microbatches of 1, interleaved_1f1b, ZeRO 1, recompute none"
    )
    assert spell_choices({"dp": 2, "pp": 1}, 1, (1, 4), "1f1b", 0, "full") == (
        "dp 2, 1 microbatch of 4, ZeRO 0, recompute full"
    )

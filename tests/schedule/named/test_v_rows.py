"""Rows of V-shaped tables, written step by step."""

from __future__ import annotations

from planner.language.schedule.named.v_rows import VRow


def test_a_step_is_for_the_next_microbatch_that_has_not_had_it():
    row = VRow(pp=2, pp_rank=0, num_microbatches=2)
    row.add(2, "F0")
    row.add(1, "F1 I1 W1 B0 F1 I1 W")
    assert " ".join(map(str, row.jobs)) == "0F0 0F1 3F0 3I0 3W0 0B0 3F1 3I1 3W1"


def test_w_alone_is_of_the_oldest_input_gradient_without_one():
    row = VRow(pp=1, pp_rank=0, num_microbatches=3)
    row.add(1, "I0 I1 I0 W W1")
    assert " ".join(map(str, row.jobs)) == "0I0 1I0 0I1 0W0 1W0"


def test_microbatches_that_there_are_not_are_left_out():
    """A fill is written for as many as it needs."""
    row = VRow(pp=1, pp_rank=0, num_microbatches=1)
    row.add(3, "F0 I0 W")
    assert " ".join(map(str, row.jobs)) == "0F0 0I0 0W0"

"""A class's layout as a plan file holds it: sizes of own stages under the names of axes."""

from __future__ import annotations

import pytest

from planner.language.layout.class_layout import MOST, ClassLayout
from planner.language.layout.placement import Replicate, Shard


def layout_of(**fields: object) -> ClassLayout:
    given = {"class_index": 0, "inputs": ["R"], "params": ["S(0)"], "outputs": ["P"], "ops": []}
    return ClassLayout.model_validate({**given, **fields})


def test_own_sizes_are_fields_by_the_names_of_axes():
    layout = layout_of(tp=2)
    assert layout.own_sizes == (("tp", 2),)
    written = layout.model_dump(mode="json")
    assert written["tp"] == 2
    assert "own_sizes" not in written
    assert ClassLayout.model_validate(written) == layout


def test_a_layout_for_the_plan_s_sizes_has_none_of_its_own():
    layout = layout_of(tp=None)
    assert layout.own_sizes == ()
    assert layout.model_dump(mode="json")["tp"] is None


def test_a_layout_can_be_the_key_of_a_price():
    assert {layout_of(tp=2): 1.0}[layout_of(tp=2)] == 1.0
    assert layout_of(tp=2) != layout_of()


def test_without_an_axis_it_is_on_the_innermost():
    assert layout_of().axis == "tp"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"axis": "dp"}, "axis dp cuts the batch; blocks have no layouts on it"),
        ({"axis": "xp"}, "mesh axis 'xp' is unknown"),
        ({"params": ["P"]}, "never partial"),
        ({"inputs": ["S(x)"]}, "is unknown"),
        ({"tp": 0}, "greater than or equal to 1"),
        ({"tp": MOST + 1}, "less than or equal to"),
        ({"cp": 2}, "Extra inputs are not permitted"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        layout_of(**fields)


def test_placements_of_parameters_are_parsed():
    assert layout_of(params=["S(1)", "R"]).param_placements == (Shard(1), Replicate())

"""Texts of rules: what they say of a call's dims, and what is refused."""

from __future__ import annotations

import pytest

from planner.errors import LayoutError
from planner.language.ops.users.equation import read_equation


def letters(text: str, inputs, outputs, uneven=frozenset()):
    found = read_equation(text, "mine.op").on(inputs, outputs, "mine.op", uneven)
    return ["".join(dim or "_" for dim in tensor) for tensor in (*found.inputs, *found.outputs)]


def test_letters_of_a_call():
    shapes = [(2, 8, 16), (16, 32)], [(2, 8, 32)]
    assert letters("b s d, df -> bsf", *shapes) == ["bsd", "df", "bsf"]
    assert letters("bs_,_f->bsf", *shapes) == ["bs_", "_f", "bsf"]


def test_leading_dims_are_aligned_at_the_last_of_them():
    shapes = [(4, 2, 8, 16), (8, 16)], [(4, 2, 8, 16)]
    assert letters("...d, ...d -> ...d", *shapes) == ["...3...2...1d", "...1d", "...3...2...1d"]
    assert letters("...d -> ...", [(16,)], [()]) == ["d", ""]


def test_a_stretched_dim_is_whole():
    assert letters("bs, bs -> bs", [(4, 1), (4, 8)], [(4, 8)]) == ["b_", "bs", "bs"]


def test_sums_and_addends():
    equation = read_equation("...d, df, +f -> ...f", "mine.op")
    assert equation.summed == {"d"}
    assert equation.addends == {2}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bsd, df", "'->'"),
        ("bs1 -> bs", "has '1'; a dim is a letter"),
        ("b...d -> bd", r"has '\.'"),
        ("bs -> bst", "'t' in a result, but in no tensor"),
    ],
)
def test_what_is_no_rule(text, told):
    with pytest.raises(ValueError, match=told):
        read_equation(text, "mine.op")


@pytest.mark.parametrize(
    ("text", "inputs", "told"),
    [
        ("bd, df -> bf", [(2, 8)], "has 2 tensors and 1 results; here it is given 1"),
        ("bsd -> bs", [(2, 8)], r"3 dims for a tensor of shape \[2, 8\]"),
        ("...bsd -> bs", [(2, 8)], r"3 dims for a tensor of shape \[2, 8\]"),
        ("bd, df -> bf", [(2, 8), (16, 4)], "'d' .* runs over 16 entries and over 8 here"),
    ],
)
def test_a_call_that_is_not_what_the_rule_says(text, inputs, told):
    with pytest.raises(LayoutError, match=told):
        letters(text, inputs, [(2, 4)])


def test_letters_that_are_counted_may_have_several_sizes():
    shapes = [(2, 32), (2, 8)], [(2, 32)]
    assert letters("bh, bh -> bh", *shapes, uneven=frozenset("h")) == ["bh", "bh", "bh"]

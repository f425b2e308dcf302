"""N10: products in 8-bit floats as a search's choice: what is compared, said and refused."""

from __future__ import annotations

import re

from planner.language.plan import load_plan
from tests.cli.test_search_notes import SEARCH

MANY = (*SEARCH[:-1], 65536)
"""So many rows that a layer's products take longer than the casts of their factors."""


def test_auto_takes_the_precision_that_is_priced_fastest(planner, write_model):
    path = write_model(width=8192)  # (its first and last layers are blocks of their own)
    found = planner("search", path, *MANY, "--precision", "auto")
    assert found.code == 0, found.stderr
    assert "precision: model " in found.stderr
    assert "2 products are in 8-bit floats, a scale for each row of a factor" in found.stderr
    assert load_plan("plan.json").precision == "fp8"
    assert "2 products are in 8-bit floats" in planner("show", "plan.json", path).stdout


def test_auto_compares_what_the_device_multiplies(planner, write_model):
    """Scales for 32 neighbours are Blackwell's; that others have none is no news."""
    path = write_model(width=8192)
    found = planner("search", path, *MANY, "--precision", "auto")
    assert "mxfp8" not in found.stderr
    newer = ("--profile", "b200-sxm", "--gpus", 2, "--global-batch", 65536)
    found = planner("search", path, *newer, "--precision", "auto")
    assert re.search(r"precision: model .+, bf16 .+, fp8 .+, mxfp8 ", found.stderr)
    older = ("--profile", "a100-sxm4-80gb", *newer[2:])
    found = planner("search", path, *older, "--precision", "auto")
    assert "precision fp8 and mxfp8 was not tried: profile 'a100-sxm4-80gb' has" in found.stderr


def test_what_can_not_be_in_8_bits_is_told_and_refused(planner, write_model):
    small = write_model("small.py")
    found = planner("search", small, *SEARCH, "--precision", "auto")
    assert "precision fp8 was not tried: " in found.stderr
    assert "has no product that `precision` fp8 casts" in found.stderr.replace(
        "--precision fp8 casts", "`precision` fp8 casts"
    )
    assert load_plan("plan.json").precision in ("model", "bf16")
    large = write_model(width=64)
    older = ("--profile", "a100-sxm4-80gb", "--gpus", 2, "--global-batch", 64)
    refused = planner("search", large, *older, "--precision", "fp8").complaint
    assert "--precision fp8 was given, and profile 'a100-sxm4-80gb' has no rate" in refused
    why = planner("why", large, *SEARCH, "--precision", "auto").complaint
    assert "--precision auto was given, and why compares plans of one precision" in why

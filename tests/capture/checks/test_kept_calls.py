"""Caches that hold tensors are emptied before a capture; others are left alone."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple

import pytest
import torch

from planner.capture.checks.kept_calls import KeptCalls


def test_caches_with_tensors_are_emptied_and_others_kept():
    @functools.lru_cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length)

    @functools.cache
    def square(number: int) -> int:
        return number * number

    @functools.cache
    def shared(name: str) -> dict:
        return {name: [torch.nn.Parameter(torch.ones(1))]}

    positions(4), square(3), shared("w")
    KeptCalls().forget()
    sizes = [f.cache_info().currsize for f in (positions, square, shared)]
    assert sizes == [0, 1, 1]  # several modules may share a parameter that is kept


Pair = namedtuple("Pair", "name table")


@pytest.mark.parametrize(
    "made",
    [
        lambda table: [("mask", table)],
        lambda table: {1: {"mask": table}},
        lambda table: Pair("mask", table),
        lambda table: OrderedDict(mask=(table,)),
    ],
    ids=["list", "dict", "named tuple", "ordered dict"],
)
def test_tensors_inside_what_is_kept_are_found(made):
    @functools.cache
    def kept(length: int):
        return made(torch.arange(length))

    kept(4)
    KeptCalls().forget()
    assert kept.cache_info().currsize == 0


def test_caches_made_later_are_found_by_looking_again():
    calls = KeptCalls()

    @functools.cache
    def table() -> torch.Tensor:
        return torch.ones(2)

    table()
    calls.forget()
    assert table.cache_info().currsize == 1
    calls.find()
    calls.forget()
    assert table.cache_info().currsize == 0

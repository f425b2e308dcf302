"""Counts of what runs, by hand."""

from __future__ import annotations

import torch

from planner.capture.opaque.cost import counted
from planner.language.graph import Affine


def num_bytes(tensor):
    return tensor.numel() * tensor.element_size()


def test_a_product_and_a_sum():
    x, weight = torch.ones(4, 8), torch.ones(8, 2)

    def run():
        return (x @ weight).t() + 1  # a product, a view, a sum

    flop, read, written, kernels, scratch = counted(run, 2, num_bytes)
    assert flop == Affine((2 * 4 * 8 * 2 + 8) // 2, 0)
    # float32: x, weight and the product are read; the product and the sum are written.
    assert read == Affine(4 * (32 + 16 + 8) // 2, 0)
    assert written == Affine(4 * (8 + 8) // 2, 0)
    assert kernels == 2
    assert scratch == Affine(4 * 8 // 2, 0)  # the product, while the sum is made


def test_counts_are_rounded_up():
    _, read, *_ = counted(lambda: torch.ones(3).neg(), 2, num_bytes)
    assert read == Affine(6, 0)
    flop, *_ = counted(lambda: torch.ones(3).neg(), 2, num_bytes)
    assert flop == Affine(3, 0)

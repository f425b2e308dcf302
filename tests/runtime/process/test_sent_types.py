"""What NCCL has no type for is sent as bytes, in its place."""

from __future__ import annotations

import pytest
import torch

from planner.runtime.process.groups.sent_types import SENT, view_to_send

OTHERS = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
OTHERS += [torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", OTHERS)
def test_bytes_that_arrive_are_the_values_that_were_sent(dtype):
    view = view_to_send(dtype)
    assert view is not None
    if dtype.is_complex:
        sent = torch.randn(3, 2, dtype=dtype)
    else:
        raw = torch.randint(0, 100, (3, 2 * torch.zeros(0, dtype=dtype).itemsize))
        sent = raw.to(torch.uint8).view(dtype)
    arrived = torch.zeros_like(sent)
    assert (view(sent).dtype, view(sent).numel()) == (torch.uint8, sent.nbytes)
    view(arrived).copy_(view(sent))  # as a receive into it does
    of = torch.view_as_real if dtype.is_complex else lambda values: values.view(torch.uint8)
    assert torch.equal(of(arrived), of(sent))


def test_others_are_sent_themselves():
    assert [view_to_send(dtype) for dtype in SENT] == [None] * len(SENT)

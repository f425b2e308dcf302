"""fp32 copies of bf16 parameters: what they hold, what they sum, what goes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.language.graph import TensorMeta
from planner.runtime.state.masters import MasterParams, cast_params, rest_dtype


def meta(dtype: str, *, kind="param", requires_grad: bool = True) -> TensorMeta:
    return TensorMeta(name="w", shape=(2,), dtype=dtype, kind=kind, requires_grad=requires_grad)


@pytest.mark.parametrize(
    ("tensor", "precision", "expected"),
    [
        (meta("bfloat16"), "bf16", torch.float32),
        (meta("bfloat16"), "model", torch.bfloat16),
        (meta("bfloat16", requires_grad=False), "bf16", torch.bfloat16),
        (meta("bfloat16", kind="buffer"), "bf16", torch.bfloat16),
        (meta("complex64"), "bf16", torch.complex64),  # in fp32 it would lose its second half
    ],
)
def test_only_bf16_parameters_that_train_rest_in_fp32(tensor, precision, expected):
    assert rest_dtype(tensor, precision) == expected


def test_steps_too_small_for_bf16_add_up_in_the_copies():
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    masters = MasterParams({"w": param, "b": frozen}, {"w": torch.ones(2)})
    copy = masters.named_params()["w"]
    assert masters.named_params()["b"] is frozen
    for _ in range(8):
        (param.float() * 2.0**-10).sum().backward()
    assert param.grad is None  # handed on: one bf16 gradient at a time is alive
    assert torch.equal(copy.grad, torch.full((2,), 8 * 2.0**-10))
    with torch.no_grad():
        copy -= copy.grad  # 1 - 2**-7, which bf16 has; a single step of 2**-10 it has not
    masters.write_back()
    assert torch.equal(param.detach().float(), torch.full((2,), 1 - 2.0**-7))


def test_programs_take_tensors_in_the_dtypes_of_the_capture():
    taken = cast_params({"w": torch.ones(2)}, [meta("bfloat16")])
    assert taken["w"].dtype == torch.bfloat16

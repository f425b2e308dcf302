"""Views: strides and shared memory of each family of views, against torch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from costmodel.memory.saved import map_storages
from planner.language.ops.kernel import KernelCall, View
from planner.language.ops.record import family_of
from tests.sharding.programs import meta_of, one_op

x, c = torch.randn(4, 6, 2), torch.randn(4, 2, dtype=torch.complex64)

VIEWS = [
    ("aten.view.default", x, [8, 6]),
    ("aten.flatten.using_ints", x, 1, 2),
    ("aten.unsqueeze.default", x, 1),
    ("aten.transpose.int", x, 0, 2),
    ("aten.permute.default", x, [2, 0, 1]),
    ("aten.movedim.intlist", x, [0], [2]),
    ("aten.numpy_T.default", x),
    ("aten.mT.default", x),
    ("aten.expand.default", x[:, :1], [4, 5, 2]),
    ("aten.slice.Tensor", x, 1, 1, 6, 2),
    ("aten.select.int", x, 1, 3),
    ("aten.unfold.default", x, 1, 3, 2),
    ("aten.diagonal.default", x, 0, 0, 1),
    ("aten.diagonal.default", x),
    ("aten.as_strided.default", x, [2, 2], [3, 1]),
    ("aten.split.Tensor", x, 3, 1),
    ("aten.unbind.int", x, 1),
    ("aten.tensor_split.indices", x, [2], 1),
    ("aten.view_as_real.default", c),
    ("aten.view_as_complex.default", x),
    ("aten.real.default", c),
    ("aten.detach.default", x),
    ("aten.contiguous.default", x),
    ("aten.dropout.default", x, 0.5, False),
]
COPIES = [
    ("aten.clone.default", x),
    ("aten.to.dtype", x, torch.float64),
    ("aten.dropout.default", x, 0.5, True),
    ("aten.cat.default", [x, x], 1),
]


@pytest.mark.parametrize("call", VIEWS, ids=lambda call: call[0])
def test_a_view_has_its_inputs_memory_and_torchs_strides(call):
    target, *args = call
    args[0] = args[0].contiguous()
    single = one_op(target, *args)
    storages = map_storages(single.program, device_type="cpu")
    name, overload = target.split(".")[1:]
    result = getattr(getattr(torch.ops.aten, name), overload)(*args)
    results = list(result) if isinstance(result, list | tuple) else [result]
    for output, tensor in zip(single.op.outputs, results, strict=True):
        assert output in storages.views
        assert storages.storage[output].root == single.op.inputs[0]
        assert storages.strides[output] == tensor.stride()


@pytest.mark.parametrize("call", COPIES, ids=lambda call: call[0])
def test_a_copy_has_memory_of_its_own(call):
    target, *args = call
    single = one_op(target, *args)
    storages = map_storages(single.program, device_type="cpu")
    (output,) = single.op.outputs
    assert not storages.views
    assert storages.storage[output].root == output


def test_a_reshape_copies_where_strides_need_it():
    """A transposed matrix has no rows that follow each other."""
    call = KernelCall(
        one_op("aten.reshape.default", torch.randn(4, 6), [24]).op,
        {"x0": meta_of("x0", torch.randn(4, 6)), "y0": meta_of("y0", torch.randn(24))},
        {"x0": (1, 4)},
        "cpu",
    )
    view = family_of("aten.reshape.default").view
    assert view is not None
    assert view(call, 0) is None
    rows = replace(call, strides={"x0": (6, 1)})
    assert view(rows, 0) == View("x0", (1,))

"""An exported program as ops of ours: what is inlined, dropped, detached and made portable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.opaque import OpaqueModules
from planner.capture.reading.read import Reader, portable_histc
from planner.capture.reading.record import Recorder
from planner.errors import CaptureError
from planner.language.graph import Ref


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(4)), body

    def forward(self, x):
        return self.body(x, self.weight)


def read(body, *, reached=("weight",)):
    module = Body(body).to("meta")
    program = torch.export.export(module, (torch.ones(2, 4, device="meta"),), strict=False)
    return Reader(
        program, module, ("x",), made=OnMeta(), calls=(), modules=OpaqueModules(), reached=reached
    ).read()


def targets(found) -> list[str]:
    return [raw.op.target for raw in found.ops]


def test_a_region_without_gradient_is_inlined_and_detaches_what_it_reads():
    def body(x, w):
        with torch.no_grad():
            scale = (x * w).amax()
        return (x * w / scale).sum()

    found = read(body)
    assert targets(found) == [
        "aten.detach.default",
        "aten.mul.Tensor",
        "aten.amax.default",
        "aten.mul.Tensor",
        "aten.div.Tensor",
        "aten.sum.default",
    ]
    made = {raw.op.target: raw.op.outputs[0] for raw in found.ops}
    assert not found.tensors[made["aten.amax.default"]].requires_grad
    assert found.tensors[found.loss].requires_grad


def test_aliases_and_joins_of_one_tensor_are_dropped():
    found = read(lambda x, w: torch.cat([torch.ops.aten.alias(x * w)]).sum())
    assert targets(found) == ["aten.mul.Tensor", "aten.sum.default"]


def test_a_write_keeps_the_dtype_of_what_it_writes():
    def body(x, w):
        total = torch.zeros(2, 4, dtype=torch.float64, device=x.device)
        total += x * w
        count = (x * w).to(torch.float64)
        low = (x * w) * 1
        low += count
        return total.sum() + low.sum()

    found = read(body)
    dtypes = [found.tensors[raw.op.outputs[0]].dtype for raw in found.ops]
    casts = [i for i, t in enumerate(targets(found)) if t == "aten.to.dtype"]
    assert dtypes[casts[-1]] == "float32"  # low += count: computed in fp64, kept in fp32
    assert dtypes[casts[-1] - 1] == "float64"


def test_a_gradient_that_the_ops_do_not_have_is_not_lost_in_silence():
    with pytest.raises(CaptureError, match="gradient of parameter weight would be lost"):
        read(lambda x, w: (x * w.detach()).sum())
    assert read(lambda x, w: (x * w.detach()).sum(), reached=())


def test_a_region_of_autocast_is_refused():
    def body(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).sum()

    with pytest.raises(CaptureError, match="leave autocast out: precision is the plan's choice"):
        read(body)


def test_integers_are_counted_through_floats():
    record = Recorder()
    numbers = torch.zeros(4, dtype=torch.int64, device="meta")
    record.tensor("n", numbers, kind="input")
    node = torch.fx.Graph().placeholder("histc")
    node.meta["val"] = numbers
    out = portable_histc(record, node, "aten.histc.default", (Ref("n"), 4, 0, 3), ())
    assert [raw.op.target for raw in record.ops] == [
        "aten.to.dtype",
        "aten.histc.default",
        "aten.to.dtype",
    ]
    assert record.tensors[out.name].dtype == "int64"
    assert record.tensors[record.ops[0].op.outputs[0]].dtype == "float32"

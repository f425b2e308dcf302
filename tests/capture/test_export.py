"""One export: the copy that is exported, what is read of it, and what is left as it was."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.fx.proxy import TracerBase

from planner.capture.export import export_batch, meta_copy, rehearse_batch
from planner.capture.opaque import OpaqueModules
from planner.errors import CaptureError
from planner.language.graph.batch import flatten_batch


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.table = torch.arange(4.0)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.second(self.first(x)) * self.frozen + self.table
        with torch.no_grad():
            self.mean = self.mean + x.mean(0)
        return x.square().mean()


BATCH = flatten_batch((torch.ones(2, 4),))


def test_a_copy_keeps_ties_and_has_no_values():
    given = Tied()
    copied = meta_copy(given)
    assert copied.second.weight is copied.first.weight
    assert not copied.frozen.requires_grad
    assert {t.device.type for t in (*copied.parameters(), copied.table, copied.mean)} == {"meta"}
    assert given.table.device.type == "cpu"


def test_what_is_read_of_an_export():
    """P: parameters once, gradients, constants by name, a buffer assigned in forward put back."""
    module = Tied()
    rehearsal, _ = rehearse_batch(lambda: meta_copy(module), *BATCH, None, (), OpaqueModules())
    assert rehearsal.reached == {"first.weight"}
    setattr_before, frames_before = nn.Module.__setattr__, TracerBase._filter_traceback_frames
    found = export_batch(meta_copy(module), *BATCH, None, rehearsal, OpaqueModules(), 2)
    assert nn.Module.__setattr__ is setattr_before
    assert TracerBase._filter_traceback_frames is frames_before
    assert logging.root.manager.disable == 0
    params = {t.fqn: t for t in found.tensors.values() if t.kind == "param"}
    assert params["first.weight"].aliases == ("second.weight",)
    assert {n for n, t in params.items() if t.requires_grad} == {"first.weight"}
    assert [t.fqn for t in found.tensors.values() if t.kind == "constant"] == ["table"]
    targets = [raw.op.target for raw in found.ops]
    assert targets.count("aten.copy_.default") == 1  # after all that reads the buffer
    detached = targets.index("aten.detach.default")
    assert targets.index("aten.clone.default") < targets.index("aten.copy_.default") > detached
    assert all("test_export.py" in line for line in found.lines)


def test_a_failing_forward_is_one_line():
    class Fails(nn.Linear):
        def forward(self, x):
            return super().forward(x[:, :3]).sum()

    with pytest.raises(CaptureError, match=r"test_export\.py:\d+: `return super") as told:
        rehearse_batch(lambda: meta_copy(Fails(4, 4)), *BATCH, None, (), OpaqueModules())
    assert "\n" not in str(told.value)

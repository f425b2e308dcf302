"""Tensors of a model by the names of its state dict; what no stage holds alone is kept once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture.norms import BatchNorm, with_told_momentum, without_sync
from planner.capture.outside import distinct, kept_outside, stored_tensors
from planner.errors import PlanError
from planner.language.across.cut.batch_statistics import CUMULATIVE
from planner.runtime.checkpoint.weight_files.config import is_pretrained, refuse_other_weights


class Tied(nn.Module):
    """Tied weights, a module of two names, a view of a parameter, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.same = self.norm
        self.none = nn.Linear(4, 4, bias=False)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("part", self.none.weight.detach()[:1])
        self.register_parameter("absent", None)


def test_stored_tensors_are_a_state_dict_in_its_order():
    model = Tied()
    found, expected = stored_tensors(model), model.state_dict()
    # (A state dict has a module's own before its children's.)
    assert set(found) == set(expected)
    assert "same.running_mean" in found
    for name, tensor in found.items():
        assert tensor.data_ptr() == expected[name].data_ptr()


def test_what_stages_do_not_hold_alone_is_kept_once():
    stored = stored_tensors(Tied())
    held = {"embed.weight", "none.weight", "norm.weight", "same.weight"}
    kept = kept_outside(stored, held=held, read={"embed.weight"})
    assert set(kept) == set(stored) - held | {"embed.weight"}
    assert kept["embed.weight"] is kept["head.weight"]
    assert kept["norm.bias"] is kept["same.bias"]
    assert kept["part"] is stored["part"]  # begins where another does, and is no whole of it
    assert len(distinct(kept)) == len({id(tensor) for tensor in kept.values()})
    assert kept_outside(stored, held=stored, read=()) == {}


def test_a_view_that_begins_where_its_tensor_does_is_another():
    whole = torch.arange(6.0).view(2, 3)
    kept = kept_outside({"whole": whole, "first": whole[:1]}, held=(), read=())
    assert kept["first"] is not kept["whole"]
    assert len(distinct(kept)) == 2


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("head.weight", (5, 4), ""),
        ("head.bias", (5,), "has head.bias, which the model has not"),
        ("head.weight", (4, 5), r"head.weight is \(4, 5\) in .* and \(5, 4\) in the model"),
        ("passing", (2,), "has passing, which the model has not"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path, name, shape, says):
    model = Tied()
    assert not is_pretrained(model)
    given = [type("Given", (), {"name": name, "shape": shape})()]
    if not says:
        refuse_other_weights(given, model, tmp_path)
        return
    with pytest.raises(PlanError, match=says):
        refuse_other_weights(given, model, tmp_path)


def test_norms_are_told_for_a_capture():
    def norms() -> nn.Sequential:
        frozen = nn.BatchNorm1d(3, momentum=None).eval()
        plain = nn.BatchNorm1d(3, track_running_stats=False, momentum=None)
        return nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3, momentum=None), frozen, plain)

    model = without_sync(norms())
    assert [type(part) for part in model] == [nn.BatchNorm1d, BatchNorm, *[nn.BatchNorm1d] * 2]
    assert [part.momentum for part in with_told_momentum(model)] == [0.1, CUMULATIVE, None, None]
    # In one process it computes what the other class does.
    x = torch.randn(4, 3)
    one, other = without_sync(norms()[1:2]), nn.BatchNorm1d(3, momentum=None)
    torch.testing.assert_close(one(x), other(x))
    torch.testing.assert_close(dict(one[0].named_buffers()), dict(other.named_buffers()))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        one(torch.ones(3))

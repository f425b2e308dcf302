"""N1: nothing is captured wrongly in silence. Each construct trains as in one process, or is
refused in one line; docs/constructs.md has the same table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import planner
from planner.capture import capture_module
from planner.errors import CaptureError
from planner.language.graph.batch import call_with_batch
from planner.language.lowering.defaults import default_plan
from tests import captures
from tests.constructs import CONSTRUCTS, Construct, batch

KEPT = [construct for construct in CONSTRUCTS if not construct.refused]
REFUSED = [construct for construct in CONSTRUCTS if construct.refused]
DOCS = Path(__file__).parents[2] / "docs" / "constructs.md"


@pytest.fixture(autouse=True)
def _fp64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def build(construct: Construct) -> nn.Module:
    torch.manual_seed(0)
    return construct.build()


QUICK = 3
"""Every so many of the kept constructs are trained in the quick tests, all in the slow ones."""


@pytest.mark.parametrize(
    "construct",
    [
        pytest.param(construct, marks=() if index % QUICK == 0 else pytest.mark.slow)
        for index, construct in enumerate(KEPT)
    ],
    ids=lambda construct: construct.what,
)
def test_what_is_kept_trains_as_in_one_process(construct, monkeypatch):
    """N1: loss, gradients, parameters and buffers of three steps, on one rank in fp64.

    The one process is another build of the module, in a plain loop.
    """
    monkeypatch.setattr("planner.capture.capture_module", captures.capture_module)  # for apply
    alone, module = build(construct), build(construct)
    graph = captures.capture_module(module, batch(2), batch(3))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, alone.state_dict()[name]), "a capture changes nothing"
    plan = default_plan(graph, num_microbatches=1, microbatch_size=6)
    settings = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    engine = planner.apply(plan, module, optimizer=lambda p: torch.optim.AdamW(p, **settings))
    optimizer = torch.optim.AdamW(alone.parameters(), **settings)
    for step in range(3):
        torch.manual_seed(step)
        data = batch(6)
        found = engine.step(data)
        optimizer.zero_grad()
        expected = call_with_batch(alone, data)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
        gradients = engine.full_gradients()
        for name, param in alone.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(gradients[name], param.grad, rtol=1e-10, atol=1e-14)
            else:
                assert name not in gradients or not gradients[name].any()
        optimizer.step()
    state = engine.full_state_dict()
    for name, tensor in (*alone.named_parameters(), *alone.named_buffers()):
        torch.testing.assert_close(state[name], tensor.detach(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("construct", REFUSED, ids=lambda construct: construct.what)
def test_what_cannot_be_kept_is_refused_in_one_line(construct):
    """N1: before anything is searched or started."""
    with pytest.raises(CaptureError, match=construct.refused) as caught:
        capture_module(build(construct), batch(2), batch(3))
    assert "\n" not in str(caught.value)


def table() -> str:
    """The docs' table, made of the constructs that the tests show."""
    rows = ["| | construct | | |", "|---|---|---|---|"]
    groups: set[str] = set()
    for construct in CONSTRUCTS:
        group = "" if construct.group in groups else construct.group
        groups.add(construct.group)
        outcome = "refused" if construct.refused else "kept"
        rows.append(f"| {group} | {construct.what} | {outcome} | {construct.note} |")
    return "\n".join(rows)


def test_the_docs_have_the_same_table():
    assert table() in DOCS.read_text()

"""A model in 16 bits sums gradients over microbatches in them: told where there are many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan.short_sums import ShortSumsWarning, short_sums_messages
from tests.captures import capture_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype))).float().square().mean()


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(size, 4)}


@pytest.mark.parametrize(
    ("dtype", "bits", "precision"), [("bfloat16", 8, "bf16"), ("float16", 11, "fp16")]
)
def test_many_microbatches_of_a_cast_model_are_told(dtype, bits, precision):
    graph = capture_module(Net().to(getattr(torch, dtype)), batch(2), batch(3))
    (message,) = short_sums_messages(graph, default_plan(graph, num_microbatches=16))
    assert message.startswith(f"3 of 3 trained parameters are {dtype}, and so are the sums of ")
    assert f"which round to {bits} bits at each; search with `precision` {precision}" in message
    assert short_sums_messages(graph, default_plan(graph, num_microbatches=15)) == ()
    cast = default_plan(graph, num_microbatches=16).model_copy(update={"precision": "bf16"})
    assert short_sums_messages(graph, cast) == ()
    whole = capture_module(Net(), batch(2), batch(3))
    assert short_sums_messages(whole, default_plan(whole, num_microbatches=16)) == ()


def test_it_is_told_at_apply():
    model = Net().to(torch.bfloat16)
    graph = capture_module(model, batch(2), batch(3))
    with pytest.warns(ShortSumsWarning, match="round to 8 bits"):
        planner.apply(default_plan(graph, num_microbatches=16), model).close()
    torch.distributed.destroy_process_group()

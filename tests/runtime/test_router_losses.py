"""Router losses and balancing biases: as one process has them, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.errors import PlanError
from planner.language.across.cut.moved_once import moved_once
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.verify import compare_with_one_process
from tests.capture.loops.looping import CHOSEN, EXPERTS, INNER, WIDTH, batch_of, captured
from tests.spawn import run_ranks

RATE = 0.01


class Balanced(nn.Module):
    """Experts of one parameter, whose choice is balanced by a loss, or by a bias of the choice."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, WIDTH)
        scores = self.gate(rows).softmax(-1)
        chosen = (scores + self.bias).topk(CHOSEN, -1).indices if self.by == "bias" else None
        chosen = scores.topk(CHOSEN, -1).indices if chosen is None else chosen
        weights = scores.gather(1, chosen)
        hits = F.one_hot(chosen, EXPERTS).sum(1).to(scores.dtype)
        loss = scores.new_zeros(())
        if self.by == "loss":
            # Switch Transformer (arXiv 2101.03961), equation 4: a product of two means over tokens.
            loss = EXPERTS * (hits.mean(0) * scores.mean(0)).sum()
        elif self.by == "logits":
            # The z-loss of ST-MoE (arXiv 2202.08906), equation 5: a mean over tokens.
            loss = torch.logsumexp(self.gate(rows), -1).square().mean()
        elif self.by == "bias":
            # DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
            with torch.no_grad():
                counts = hits.sum(0)
                self.bias.add_(RATE * torch.sign(counts.mean() - counts))
        out = torch.zeros_like(rows)
        for number in range(EXPERTS):
            which, slot = torch.where(chosen == number)
            made = F.silu(rows[which] @ self.up[number]) @ self.down[number]
            out.index_add_(0, which, made * weights[which, slot].unsqueeze(-1))
        return out.view_as(x), loss


class Model(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Balanced(by) for _ in range(2))
        self.head = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        balance = x.new_zeros(())
        for layer in self.layers:
            made, loss = layer(x)
            x, balance = x + made, balance + loss
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance


def batch(size: int) -> dict[str, Tensor]:
    return batch_of(size, torch.float32)


def build(by: str) -> Model:
    torch.manual_seed(0)
    return Model(by)


def graph_of(by: str) -> ModelGraph:
    return captured(build(by), batch)


def tried(by: str, graph: Any, choices: list[dict[str, Any]]) -> list[str]:
    """For each plan: that it equals one process, how it does not, or the refusal."""
    source = ModelSource(
        path=Path("model.py"), build=partial(build, by), batch=batch, loss=None, dependencies=()
    )
    graph, found = from_json(graph), []
    for given in choices:
        accept = given.get("accept", ())
        how = {name: value for name, value in given.items() if name != "accept"}
        plan = default_plan(graph, **{"microbatch_size": 4, "num_microbatches": 1} | how)
        plan = plan.model_copy(update={"accept": accept})
        try:
            report = compare_with_one_process(plan, source, steps=2, graph=graph)
        except PlanError as error:
            found.append(str(error))
            continue
        found.append("" if report is None else "equal" if report.passed else str(report))
    return found


LOCAL = ("local-samples", "local-buffers")
REPLICAS: list[dict[str, Any]] = [{"dp": 2}, {"dp": 2, "ep": 2}, {"tp": 2}]
PARTS: list[dict[str, Any]] = [
    {"pp": 2, "num_microbatches": 2},
    {"dp": 2, "ep": 2, "num_microbatches": 2},
]


def check(by: str, choices: list[dict[str, Any]]) -> list[str]:
    return run_ranks(tried, 2, by, to_json(graph_of(by)), choices)[0]


@pytest.mark.parametrize("by", ["loss", "bias"])
def test_means_and_counts_are_the_batchs_over_replicas(by) -> None:
    """With one microbatch ranks sum what they counted before it is used."""
    assert check(by, REPLICAS) == ["equal"] * len(REPLICAS)


@pytest.mark.parametrize("by", ["loss", "bias"])
def test_over_microbatches_they_are_refused_by_name(by) -> None:
    line = "hits.mean(0) * scores.mean(0)" if by == "loss" else "counts = hits.sum(0)"
    for told in check(by, PARTS):
        assert "values are computed across samples" in told
        assert line in told
        assert "`accept` local-samples" in told


@pytest.mark.parametrize("by", ["loss", "bias"])
def test_accepted_each_part_has_its_own(by) -> None:
    """As one process that goes part by part, with a bias of its own for each replica."""
    choices = [{"accept": LOCAL} | how for how in [*PARTS, {"dp": 2}]]
    assert check(by, choices) == ["equal"] * len(choices)


def test_a_mean_over_tokens_is_exact_over_parts() -> None:
    """It is a term of the loss, and its parts count as samples do."""
    assert check("logits", [*REPLICAS, *PARTS]) == ["equal"] * 5


def test_a_bias_that_counts_decide_does_not_move_once() -> None:
    """What follows from samples is each part's own, also behind a sign."""
    assert not moved_once(graph_of("bias"))

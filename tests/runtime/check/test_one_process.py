"""The one process of `verify`: the user's module, trained piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.capture.source.model_file import ModelSource
from planner.language.lowering.defaults import default_plan
from planner.runtime.batches.inputs.feed import CutBatch, cut_batch
from planner.runtime.proofs.one_process import OneProcess, Piece
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny

SOURCE = ModelSource(
    path=Path("mlp.py"), build=MlpWithTarget, batch=mlp_batch, loss=None, dependencies=()
)


@pytest.fixture
def cut():
    graph = capture_tiny("mlp")
    return cut_batch(mlp_batch(4), graph, default_plan(graph, microbatch_size=2))


def process(values: nn.Module, **options) -> OneProcess:
    return OneProcess(
        SOURCE,
        values,
        optimizer=lambda params: torch.optim.SGD(list(params), lr=0.1),
        own=torch.float32,
        draws=nullcontext,
        **options,
    )


def by_samples(cut: CutBatch, runs: Sequence[range]) -> list[float]:
    return [len(run) / cut.split.num_samples for run in runs]


PIECES = [Piece(replica=0, samples=range(3)), Piece(replica=1, samples=range(3, 4))]


def test_a_piece_counts_by_its_samples(cut):
    torch.manual_seed(0)
    values = MlpWithTarget()
    alone = MlpWithTarget().double()
    alone.load_state_dict(values.state_dict())
    x, target = (t.double() for t in mlp_batch(4))
    loss = alone(x, target)
    loss.backward()
    for pieces in (PIECES, [Piece(replica=0, samples=range(4))]):
        found = process(values).step(cut, pieces, by_samples)
        torch.testing.assert_close(found["loss"]["loss"], loss.detach(), rtol=1e-12, atol=0)
        for name, param in alone.named_parameters():
            torch.testing.assert_close(found["gradient"][name], param.grad, rtol=1e-10, atol=1e-14)
            moved = param.detach() - 0.1 * param.grad
            torch.testing.assert_close(found["parameter"][name], moved, rtol=1e-12, atol=0)


def test_only_rounding_tells_the_moved_and_the_reordered_from_it(cut):
    values = MlpWithTarget()
    pieces = [Piece(replica=0, samples=range(4))]
    plain, moved, reordered = (
        process(values, **options).step(cut, pieces, by_samples)["gradient"]["fc1.weight"]
        for options in ({}, {"moved": 1}, {"backwards": True})
    )
    for other in (moved, reordered):
        assert not torch.equal(other, plain)
        torch.testing.assert_close(other, plain, rtol=1e-11, atol=1e-15)

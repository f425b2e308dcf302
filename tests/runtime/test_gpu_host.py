"""M23, M24 on a GPU: what waits on the host gives the same bits and leaves the device.

On a CPU device and host are one memory; here they are two, copies run on streams of their own,
and what the host's side pins is really pinned.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

import planner
from costmodel import CostCache, estimate
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.optimizers import host_optimizer
from profiles import load_profile
from tests.builders import PlainGPT, gpt_batch
from tests.runtime.scenarios import capture
from tests.runtime.test_gpu import needs
from tests.runtime.test_host_activations import with_offload
from tests.spawn import free_port

STEPS = 2
LEARNING_RATE = 2.0**-6
"""A power of two: its product with a gradient is exact, so CPU and GPU round a step alike."""
MANY = {"num_microbatches": 6, "microbatch_size": 8, "schedule": "fthenb"}


def _join(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.use_deterministic_algorithms(True, warn_only=True)


def _train(plan: Plan, optimizer: type[torch.optim.Optimizer], **settings) -> tuple:
    """Losses, weights and gradients after some steps, and the device bytes that the program
    asked the allocator for: between steps, and the most in one.
    """
    torch.manual_seed(0)
    # What an engine of before still holds until cycles are collected, and cuBLAS's workspace, which
    # a first product takes and keeps, are no bytes of this one.
    gc.collect()
    a = torch.ones(64, 64, device="cuda")
    (a @ a).sum().item()
    del a
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    engine = planner.apply(plan, PlainGPT(), optimizer=lambda params: optimizer(params, **settings))
    batch = gpt_batch(plan.global_batch)
    losses = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        losses.append(engine.step(batch).item())
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    rest, peak = (stats[f"requested_bytes.all.{kind}"] - before for kind in ("current", "peak"))
    return losses, engine.full_state_dict(), engine.full_gradients(), rest, peak


def _equal(a: tuple, b: tuple) -> None:
    assert a[0] == b[0]
    for found, expected in zip(a[1:3], b[1:3], strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _same_bits(rank: int, port: int, plan: Plan) -> None:
    _join(rank, port)
    host_optimizer.BUCKET_BYTES = 20_000  # a few parameters each, so that slots are used again
    settings = {"lr": LEARNING_RATE}
    stays = _train(plan, torch.optim.SGD, **settings)
    _equal(_train(with_offload(plan), torch.optim.SGD, **settings), stays)
    on_host = plan.model_copy(update={"optimizer_on_host": True})
    _equal(_train(on_host, torch.optim.SGD, **settings), stays)
    _equal(_train(with_offload(on_host), torch.optim.SGD, **settings), stays)


def _bytes_leave(rank: int, port: int, plan: Plan, predicted: dict[str, float]) -> None:
    _join(rank, port)
    settings = {"lr": LEARNING_RATE, "fused": True}
    stays = _train(plan, torch.optim.AdamW, **settings)
    activations = _train(with_offload(plan), torch.optim.AdamW, **settings)
    optimizer = _train(
        plan.model_copy(update={"optimizer_on_host": True}), torch.optim.AdamW, **settings
    )
    assert stays[4] - activations[4] == pytest.approx(predicted["activations"], rel=0.05)
    assert stays[3] - optimizer[3] == pytest.approx(predicted["optimizer"], rel=0.01)


@needs(1)
def test_the_same_bits_whatever_waits_on_the_host():
    """M23, M24: activations, the optimizer, and both, beside neither."""
    plan = default_plan(capture("gpt"), **MANY)
    torch.multiprocessing.spawn(_same_bits, (free_port(), plan), nprocs=1)


@needs(1)
def test_device_bytes_fall_as_predicted():
    """M24: the step's peak by the activations that are away then, what rests between steps by
    the optimizer's state.
    """
    graph = capture("gpt")
    costs = CostCache(graph, load_profile("h100-sxm5-80gb"))
    plan = default_plan(graph, **MANY)

    def tensors(plan: Plan) -> float:
        (parts,) = estimate(graph, costs.profile, plan, costs=costs).memory
        return float(parts.tensor_bytes)

    def state(plan: Plan) -> float:
        (parts,) = estimate(graph, costs.profile, plan, costs=costs).memory
        return float(parts.optimizer_bytes)

    on_host = plan.model_copy(update={"optimizer_on_host": True})
    predicted = {
        "activations": tensors(plan) - tensors(with_offload(plan)),
        "optimizer": state(plan) - state(on_host),
    }
    assert predicted["activations"] > 0 < predicted["optimizer"]
    torch.multiprocessing.spawn(_bytes_leave, (free_port(), plan, predicted), nprocs=1)

"""B14: Runs over the backend `staged`, which holds them to NCCL's rules, equal one process (fp64).

Every schedule, ZeRO, each mesh axis, meshes of unlike shape, values that skip stages, shared
parameters, clipping, types that NCCL lacks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.schedule.registry import SCHEDULES
from tests.captures import capture_module
from tests.runtime import scenarios
from tests.runtime.beside import OneProcess, sgd, train_beside
from tests.runtime.scenarios import RTOL, capture, clip_many
from tests.spawn import run_ranks

Case = tuple[str, dict[str, Any]]

FOLDED = {"pp": 2, "vpp": 2, "schedule": "zb_v"}
QUICK: list[Case] = [
    ("small-gpt", {"pp": 2}),
    ("small-gpt", {**FOLDED, "num_microbatches": 2}),
]


def schedules() -> list[Case]:
    """Every schedule on two ranks, with as few stages as it takes."""
    return [
        ("gpt", {"pp": 2, "vpp": max(spec.min_vpp, 1), "schedule": name, "num_microbatches": 4})
        for name, spec in sorted(SCHEDULES.items())
    ]


def check(world_size: int, cases: list[Case], backend: str = "staged") -> None:
    """Train each as one process does."""
    scenarios.check(world_size, cases, backend=backend, timeout_s=60)


def test_pipelines_run_in_the_order_of_their_messages():
    """A value from one stage of a rank to another is no message, and connects nobody."""
    check(2, QUICK)


def test_axes_of_one_stage():
    check(2, [("small-gpt", {"tp": 2}), ("small-gpt", {"dp": 2, "zero_stage": 2})])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SCHEDULES), 4))
def test_every_schedule(first):
    check(2, schedules()[first : first + 4])


@pytest.mark.slow
def test_replicas_and_sequences():
    check(
        2,
        [
            ("small-gpt", {"dp": 2}),
            ("small-gpt", {"dp": 2, "zero_stage": 1}),
            ("small-gpt", {"dp": 2, "zero_stage": 3, "recompute": "full"}),
            ("small-gpt", {"cp": 2}),
            ("encoder-decoder", {"tp": 2}),
            ("empty-gpt", {"pp": 2}),
            ("unet", {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}),
            ("small-tied-gpt", {"pp": 2}),
        ],
    )


@pytest.mark.slow
def test_several_axes_on_four_ranks():
    two = {"pp": 2, "tp": 2, "num_microbatches": 2, "microbatch_size": 2}
    check(
        4,
        [
            ("small-gpt", {**two, "by_stage": {"tp": (2, 1)}}),
            ("small-tied-gpt", {**two, "by_stage": {"tp": (2, 1)}, "zero_stage": 1}),
            ("encoder-decoder", {**two, "by_stage": {"tp": (1, 2)}}),
            ("small-gpt", {"dp": 2, "pp": 2, "zero_stage": 3}),
            ("small-gpt", {"rp": 2, "dp": 2, "zero_stage": 2}),
            ("small-tied-gpt", {"tp": 2, **FOLDED, "num_microbatches": 2}),
            ("unet", {"pp": 4, "num_microbatches": 4, "schedule": "zb_h1"}),
        ],
    )


@pytest.mark.slow
def test_clipping():
    ways = [{"pp": 2, "tp": 2}, {"dp": 2, "pp": 2, "zero_stage": 2}]
    plans = [("small-gpt", default_plan(capture("small-gpt", torch.float64), **w)) for w in ways]
    for norm, expected, gap in run_ranks(clip_many, 4, plans, 0.05, backend="staged")[0]:
        assert norm == pytest.approx(expected, rel=RTOL)
        assert gap < RTOL


class Rotated(nn.Module):
    """Hands on complex numbers that are conjugated only when they are read, and 16-bit integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.last = nn.Linear(3, 1)
        self.rows = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        z = torch.complex(y, y.cos()).conj()
        which = (y.sum(-1) > 0).to(torch.int16)
        z = z + self.layers[1](z.real)
        read = z * self.layers[2](z.imag) + self.rows(which.long())
        return self.last(read.real + read.imag).square().mean()


def batch(size: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, 5, 3, generator=generator, dtype=torch.float64),)


def train_rotated() -> tuple[list[str], float]:
    """The types of what is sent, and how far training is from one process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Rotated()
    alone = OneProcess(module, sgd)
    graph = capture_module(Rotated(), batch(2), batch(3), name="rotated")
    # The first stage hands the conjugate on.
    plan = default_plan(graph, pp=2, balance=(1, 3), num_microbatches=2, microbatch_size=2)
    engine = planner.apply(plan, module, optimizer=sgd(module))
    gaps = train_beside(engine, alone, [batch(plan.global_batch)] * 2)
    return sorted({edge.dtype for edge in engine._executor._edges}), gaps.largest


@pytest.mark.parametrize("backend", ["gloo", "staged"])
def test_types_that_nccl_lacks_are_sent(backend):
    dtypes, gap = run_ranks(train_rotated, 2, backend=backend, timeout_s=60)[0]
    assert dtypes == ["complex128", "float64", "int16"]
    assert gap < 1e-12

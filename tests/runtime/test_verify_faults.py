"""Faults put into the plan's side are found, however small the gradients they are in.

The model has a side branch that counts a millionth: its gradients are a million times smaller
than the largest. Its graph is captured from the model without hooks, so that the hooks are in
the one process alone, as if capture had lost them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from planner.runtime.step.engine import Engine
from tests.captures import capture_module
from tests.spawn import run_ranks

WIDTH = 8
SMALL = 1e-6


class TwoBranches(nn.Module):
    """A main branch, and a side branch of another input that counts a millionth."""

    def __init__(self):
        super().__init__()
        self.main, self.side = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x, z, target):
        return F.mse_loss(self.main(x) + SMALL * self.side(z), target)


def batch(size):
    generator = torch.Generator().manual_seed(size)
    return {n: torch.randn(size, WIDTH, generator=generator) for n in ("x", "z", "target")}


def source_of(build: Callable[[], nn.Module], batch: Callable[[int], Any] = batch) -> ModelSource:
    return ModelSource(path=Path("model.py"), build=build, batch=batch, loss=None, dependencies=())


def graph_of(build: Callable[[], nn.Module], batch: Callable[[int], Any] = batch) -> ModelGraph:
    return capture_module(build(), batch(2), batch(3))


def verify_here(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any] = batch,
    *,
    graph: ModelGraph | None = None,
    steps: int = 1,
    make_engine: Callable[..., Engine] = Engine,
) -> VerifyReport:
    """Verify a plan of one rank and two microbatches in this process."""
    graph = graph or graph_of(build, batch)
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    report = compare_with_one_process(
        plan, source_of(build, batch), graph=graph, steps=steps, make_engine=make_engine
    )
    assert report is not None
    return report


# -- hooks ----------------------------------------------------------------------------------


def _halve_and_add(grad):
    return 0.5 * grad + 1e-9


def on_parameter(module, weight):
    weight.register_hook(_halve_and_add)


def after_accumulating(module, weight):
    def scale(param):
        param.grad.mul_(0.1)

    weight.register_post_accumulate_grad_hook(scale)


def of_full_backward(module, weight):
    module.register_full_backward_hook(lambda module, grads, _: tuple(0.1 * g for g in grads))


def on_tensor(module, weight):
    module.register_forward_hook(
        lambda module, inputs, output: (output.register_hook(_halve_and_add), None)[1]
    )


@pytest.mark.parametrize("hook", [on_parameter, after_accumulating, of_full_backward, on_tensor])
@pytest.mark.parametrize("branch", ["main", "side"])
def test_a_lost_hook_is_found(hook, branch):
    """N1, N3: the one process is the user's module with its hooks, in fp64 as well."""

    def build():
        module = TwoBranches()
        last = getattr(module, branch)[2]
        hook(last, last.weight)
        return module

    report = verify_here(build, graph=graph_of(TwoBranches))
    assert not report.passed
    assert report.gradient.name.startswith(branch)


# -- faults in tiny gradients ---------------------------------------------------------------


def _of_side(engine: Engine) -> list[nn.Parameter]:
    return [
        p for n, copies in engine.state.trained.by_name().items() if "side" in n for p in copies
    ]


class WrongScale(Engine):
    """The side branch's gradients are a ten-thousandth too large."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        finish = self.state.trained.finish_sums

        def finish_and_scale() -> None:
            finish()
            for param in _of_side(self):
                assert param.grad is not None
                param.grad.mul_(1 + 1e-4)

        self.state.trained.finish_sums = finish_and_scale  # type: ignore[method-assign]


class MissingReduction(Engine):
    """The side branch's gradients are those of this rank's own samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ((buckets,),) = self.state.trained._buckets.values()
        start, finish = buckets.start, buckets.finish
        own: dict[nn.Parameter, torch.Tensor] = {}

        def keep_and_start() -> None:
            own.update({p: p.grad.clone() for p in _of_side(self) if p.grad is not None})
            start()

        def finish_and_restore() -> None:
            finish()
            for param, grad in own.items():
                assert param.grad is not None
                param.grad.copy_(grad)

        buckets.start = keep_and_start  # type: ignore[method-assign]
        buckets.finish = finish_and_restore  # type: ignore[method-assign]


class SwappedMicrobatches(Engine):
    """The side branch sees the samples of microbatches 0 and 1 swapped."""

    def _feed(self, batch: Any) -> Any:
        size = self.plan.microbatch_size * self.plan.dp
        return super()._feed({**batch, "z": batch["z"].roll(size, 0)})


class SkippedMicrobatch(Engine):
    """The side branch gets no gradient of the first microbatch."""

    def _before_backward(self, stage_index: int, is_last: bool) -> None:
        super()._before_backward(stage_index, is_last)
        for param in _of_side(self):
            if is_last and param.grad is not None:
                param.grad.zero_()


class OneEntryOff(Engine):
    """One entry of one weight gradient of the side branch is a thousandth off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        finish = self.state.trained.finish_sums

        def finish_and_change() -> None:
            finish()
            for param in _of_side(self)[:1]:
                assert param.grad is not None
                param.grad[0, 0] *= 1.001

        self.state.trained.finish_sums = finish_and_change  # type: ignore[method-assign]


class NoDecay(Engine):
    """The optimizer does not decay the side branch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.optimizer is not None
        (group,) = self.optimizer.param_groups
        side = set(_of_side(self))
        rest = [p for p in group["params"] if p not in side]
        other = {**group, "params": list(side), "weight_decay": 0.0}
        self.optimizer.param_groups[:] = [{**group, "params": rest}, other]


GRADIENT_FAULTS = [
    WrongScale,
    MissingReduction,
    SwappedMicrobatches,
    SkippedMicrobatch,
    OneEntryOff,
]


def verify_each(
    captured: Any, build: Callable[[], nn.Module], engines: list[Callable[..., Engine]], steps: int
) -> list[VerifyReport | None]:
    graph = from_json(captured)
    plan = default_plan(graph, dp=2, microbatch_size=2, num_microbatches=3)
    verify = partial(compare_with_one_process, plan, source_of(build), graph=graph, steps=steps)
    return [verify(make_engine=engine) for engine in engines]


def verify_on_two(
    graph: ModelGraph,
    build: Callable[[], nn.Module],
    *engines: Callable[..., Engine],
    steps: int = 1,
) -> list[VerifyReport]:
    """Verify a plan of dp=2 and three microbatches, once with each engine."""
    return run_ranks(verify_each, 2, to_json(graph), build, list(engines), steps)[0]


def test_faults_in_gradients_of_a_millionth_are_found_at_the_first_step():
    """N3, X13: each fault alone fails, in the gradients it is in; the right engine passes."""
    engines = [Engine, *GRADIENT_FAULTS, NoDecay]
    right, *wrong = verify_on_two(graph_of(TwoBranches), TwoBranches, *engines)
    assert right.passed
    assert right.gradient.times < 100
    for engine, report in zip(engines[1:], wrong, strict=True):
        assert not report.passed, engine
        if engine is NoDecay:
            assert report.parameter.name.startswith("side")
            assert report.gradient.times < 100
            continue
        assert report.gradient.name.startswith("side"), engine
        assert report.gradient.relative < 10 * SMALL  # it is small beside the largest gradient
        assert report.gradient.times > 1e4, engine


# -- no gradient ----------------------------------------------------------------------------


class Unused(TwoBranches):
    """A layer the forward does not use, one that is frozen, and a branch seen without gradient."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.main[2].bias.requires_grad_(False)

    def forward(self, x, z, target):
        with torch.no_grad():
            seen = self.side(z)
        return F.mse_loss(self.main(x) + seen, target)


def without_gradient(graph: ModelGraph, part: str) -> ModelGraph:
    """The graph in which the parameters of a part train no more."""
    data = to_json(graph)
    for tensor in data["tensors"]:
        if tensor["kind"] == "param" and tensor["fqn"].startswith(part):
            tensor["requires_grad"] = False
    return from_json(data)


def test_parameters_that_no_gradient_reaches_are_equal_and_stay():
    """N3: none is as good as zero, and neither side's optimizer moves them."""
    graph = without_gradient(graph_of(Unused), "side")
    (report,) = verify_on_two(graph, Unused, Engine, steps=2)
    assert report.passed, report


def test_a_parameter_that_only_one_side_decays_is_found():
    """N3: torch's optimizers skip what has no gradient; a plan that gives it zeros decays it."""
    graph = without_gradient(graph_of(TwoBranches), "side")
    report = verify_here(TwoBranches, graph=graph)
    assert not report.passed
    assert report.gradient.name.startswith("side")
    assert report.parameter.name.startswith("side")


# -- buffers --------------------------------------------------------------------------------


class Drifting(nn.Module):
    """Its forward moves running statistics, reads them, and moves on from what it read."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, z, target):
        y = self.norm(self.inner(x))
        y = y * self.norm.running_var + self.norm.running_mean
        return F.mse_loss(self.outer(y), target)


class MergedStatistics(Engine):
    """After each step every replica goes on with the second replica's statistics."""

    def step(self, batch: Any) -> torch.Tensor:
        loss = super().step(batch)
        for stage in self.stages.values():
            for tensor in stage.passed.values():
                torch.distributed.broadcast(tensor, src=1)
        return loss


def test_buffers_that_a_forward_moves_and_reads_are_each_replica_s_own():
    """N3: exact, with the samples of each replica apart; and compared when the step ends."""
    engines = (Engine, MergedStatistics)
    right, merged = verify_on_two(graph_of(Drifting), Drifting, *engines, steps=2)
    assert right.passed, right
    assert right.buffer.name
    assert not merged.passed
    assert merged.buffer.relative > 1e-3

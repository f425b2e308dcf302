"""The host beside the device: time of a job and of an op, synchronisations, checkpoints."""

from __future__ import annotations

import collections
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.cases import TINY, StepCase, graph_of, plan_of
from benchmarks.gpu.parts.alone import batch_of, be_alone, builder, freed, step_seconds
from benchmarks.gpu.parts.graphs import _last_op
from benchmarks.gpu.results import Result, Setting

FEW, MANY = 4, 12
"""Microbatches; the difference has the jobs alone."""

STEPS_AFTER = 3
"""Steps that go on while a checkpoint is written."""


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result for each kind of work."""
    be_alone(setting)
    checks = {"jobs and ops": _jobs, "synchronisations": _synchronisations, "buffers": _buffers}
    for name, check in checks.items():
        if name in setting.known:
            continue
        began = time.monotonic()
        with freed(setting):
            try:
                measured, status, note = check(setting)
            except Exception as error:
                status, measured = "fail", {}
                note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield Result(
            part="host",
            check=name,
            status=status,
            seconds=time.monotonic() - began,
            measured=measured,
            note=note,
        )


def _engine(setting: Setting, num_microbatches: int, layers: int) -> tuple[Any, Any]:
    import planner

    case = StepCase(
        name="host", sizes=TINY | {"layers": layers}, sequence=32, num_microbatches=num_microbatches
    )
    engine = planner.apply(plan_of(case, graph_of(case)), builder(case))
    batch = batch_of(case)
    engine.step(batch)
    return engine, batch


def _jobs(setting: Setting) -> tuple[dict[str, float], Any, str]:
    """A tiny model, so that the device waits for the host: seconds of a job, with its ops."""
    layers = 2 if setting.tiny else 24
    seconds, ops = {}, {}
    for count in (FEW, MANY):
        engine, batch = _engine(setting, count, layers)
        with _last_op() as counted:
            engine.step(batch)
        ops[count] = counted.count
        seconds[count] = step_seconds(partial(engine.step, batch), setting)
        engine.close()
    more_s, jobs = seconds[MANY] - seconds[FEW], 2 * (MANY - FEW)
    more_ops = ops[MANY] - ops[FEW]
    measured = {"job_s": more_s / jobs, "op_s": more_s / max(1, more_ops)}
    measured["step_without_jobs_s"] = seconds[FEW] - more_s * FEW / (MANY - FEW)
    return measured, "pass", f"{more_ops / jobs:.0f} ops a job"


def _synchronisations(setting: Setting) -> tuple[dict[str, float], Any, str]:
    """How often the host waits for the device in a step, and where."""
    if setting.device != "cuda":
        return {}, "not run", "a CPU has nothing to wait for"
    import torch

    engine, batch = _engine(setting, FEW, 4)
    engine.step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
    found = [w for w in caught if "synchroniz" in str(w.message)]
    where = collections.Counter(f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}" for w in found)
    told = ", ".join(f"{place} x {count}" for place, count in where.most_common(8))
    return {"synchronisations": float(len(found))}, "pass", told


class _Norms:
    """A model whose buffers change in every step, and are large."""

    @staticmethod
    def build(width: int) -> Any:
        from torch import nn

        class Normed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, width)
                self.norm = nn.BatchNorm1d(width)
                self.last = nn.Linear(width, 1)

            def forward(self, x: Any) -> Any:
                return self.last(self.norm(self.first(x))).square().mean()

        return Normed()


def _buffers(setting: Setting) -> tuple[dict[str, float], Any, str]:
    """A checkpoint has the buffers of its step, bit by bit, though training goes on meanwhile."""
    import torch

    import planner
    from planner.capture import capture_module
    from planner.language.lowering.defaults import default_plan

    width = 64 if setting.tiny else 2**22
    # Captured small: a plan holds no width but that of its own model.
    module = _Norms.build(width)
    graph = capture_module(module, {"x": torch.randn(2, 8)}, {"x": torch.randn(3, 8)}, name="norms")
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1)
    engine = planner.apply(plan, module, deferred_batch_norm=True)
    engine.step({"x": torch.randn(4, 8)})
    names = ("norm.running_mean", "norm.running_var")
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        before = {name: engine.full_state_dict()[name].clone() for name in names}
        engine.save(folder)
        for _ in range(STEPS_AFTER):
            engine.step({"x": torch.randn(4, 8)})
        engine.wait_for_save()
        after = engine.full_state_dict()
        moved = [name for name in names if not torch.equal(after[name], before[name])]
        engine.load(folder)
        loaded = engine.full_state_dict()
        wrong = [name for name in names if not torch.equal(loaded[name], before[name])]
    engine.close()
    note = f"differ: {', '.join(wrong)}" if wrong else f"{len(moved)} had changed meanwhile"
    return {"buffer_bytes": 8.0 * width}, "fail" if wrong else "pass", note

"""A training's figures every few steps: a line in the terminal, JSON lines, TensorBoard, wandb.

    log = planner.StepLog(engine, every=10, folder="logs", to=("console", "jsonl", "tensorboard"))

Figures are those that every rank has after a step anyway, so nothing is sent for them; rank 0
writes. Free of torch when imported.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from planner.runtime.step.engine import Engine

Sink = Callable[[int, Mapping[str, float]], None]
"""Takes a step's number and its figures."""


class StepLog:
    """Writes figures each `every` updates of an engine. Mutable: what happened since the last.

    loss               mean over the samples since the last line
    lr, grad_norm      of the last update (grad_norm where gradients are clipped)
    loss_scale         with precision "fp16", of the next step; loss and grad_norm are not scaled.
                       skipped_steps are those that were passed over since the training began
    step_s             seconds for an update, with everything between two of them
    samples_per_s      and tokens_per_s, where `tokens_per_sample` is given
    model_tflop_per_s  of one device: the flop of the model's ops forward and backward, once each,
                       whatever is recomputed; mfu is its share of `peak_tflop_per_s`
    replica_work       work of the last batch's fullest replica over the mean, where samples are
                       packed documents, dealt by it; replica_work_given is that in their own order
    microbatch_work    that of the fullest microbatch, and microbatch_work_given
    memory_gb          most bytes in use on this device since the log began, those that a stream
                       still needs among them (on a CPU: the process's since it began), in 1e9
    """

    def __init__(
        self,
        engine: Engine,
        *,
        every: int = 10,
        folder: str | os.PathLike[str] | None = None,
        to: Sequence[str | Sink] = ("console",),
        tokens_per_sample: float | None = None,
        peak_tflop_per_s: float | None = None,
    ) -> None:
        """`to` names sinks ("console", "jsonl", "tensorboard", "wandb") or gives functions from
        (step, figures); "jsonl" and "tensorboard" write to `folder`. Raises PlanError for another
        name, a sink that is not installed, or one without a folder.
        """
        if every < 1:
            raise PlanError(f"every={every} must be at least 1: the steps between two lines")
        self._engine, self._every = engine, every
        self._tokens, self._peak = tokens_per_sample, peak_tflop_per_s
        is_first = engine.mesh.global_rank == 0
        checked = [_sink(each, folder, is_used=is_first) for each in to]
        self._sinks = checked if is_first else []
        self._flop: float | None = None
        _reset_peak(engine.mesh.device)
        self._begin()
        engine.after_step.append(self._take)
        engine.after_load.append(self._begin)

    def _begin(self) -> None:
        """Begin a line at the engine's present step: it may have been loaded, and be any."""
        self._last_samples = self._engine.samples
        self._begin_line()

    def _begin_line(self) -> None:
        self._steps, self._samples = self._engine.steps, 0
        self._loss: Any = 0.0
        self._start = perf_counter()

    def _take(self, loss: Tensor) -> None:
        engine = self._engine
        samples, self._last_samples = (
            engine.samples - self._last_samples,
            engine.samples,
        )
        if not self._sinks:
            return
        self._samples += samples
        # On the device: reading it would wait for the step.
        self._loss = self._loss + loss.detach() * samples
        if engine.steps - self._steps >= self._every:
            figures = self._figures()
            for sink in self._sinks:
                sink(engine.steps, figures)
            self._begin_line()

    def _figures(self) -> dict[str, float]:
        engine = self._engine
        figures = {"loss": float(self._loss) / self._samples}
        seconds = perf_counter() - self._start  # after the loss was waited for
        if engine.grad_norm is not None:
            figures["grad_norm"] = float(engine.grad_norm)
        if engine.optimizer is not None and engine.optimizer.param_groups:
            figures["lr"] = float(engine.optimizer.param_groups[0]["lr"])
        if engine.scaler is not None:
            figures["loss_scale"] = engine.scaler.scale
            figures["skipped_steps"] = engine.scaler.skipped_steps
        rate = self._samples / seconds
        figures["step_s"] = seconds / (engine.steps - self._steps)
        figures["samples_per_s"] = rate
        if self._tokens is not None:
            figures["tokens_per_s"] = rate * self._tokens
        if self._flop is None:
            from planner.language.ops.flops import model_flop

            # (A graph counts the samples that belong together as one.)
            unit, size = engine.plan.unit.size, engine.plan.stage_microbatch_size(0)
            self._flop = model_flop(engine.graph, size) / (size * unit)
        figures["model_tflop_per_s"] = rate * self._flop / engine.plan.world_size / 1e12
        if self._peak is not None:
            figures["mfu"] = figures["model_tflop_per_s"] / self._peak
        if engine.dealt is not None:
            now, given = engine.dealt.now, engine.dealt.given
            figures |= {"replica_work": now.replica, "replica_work_given": given.replica}
            figures |= {
                "microbatch_work": now.microbatch,
                "microbatch_work_given": given.microbatch,
            }
        figures["memory_gb"] = _peak_bytes(engine.mesh.device) / 1e9
        return figures


def _reset_peak(device: Any) -> None:
    """Count from now on: building a model takes what a step does not."""
    import torch

    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(device)


def _peak_bytes(device: Any) -> float:
    import torch

    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "memory_stats"):
            # Not what is allocated: blocks that a tensor has left and a stream still reads are in
            # nobody else's use.
            return float(module.memory_stats(device).get("active_bytes.all.peak", 0))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(used if sys.platform == "darwin" else used * 1024)


def _sink(given: str | Sink, folder: str | os.PathLike[str] | None, *, is_used: bool) -> Sink:
    """The sink by a name; what it opens is opened where it `is_used`."""
    if callable(given):
        return given
    if given not in _SINKS:
        raise PlanError(f"to={given!r} is no log; give {', '.join(_SINKS)} or a function")
    if given in ("jsonl", "tensorboard") and folder is None:
        raise PlanError(f"to={given!r} writes files; give folder=")
    return _SINKS[given](Path(folder or ".")) if is_used else _nothing


def _nothing(step: int, figures: Mapping[str, float]) -> None:
    pass


def _console(folder: Path) -> Sink:
    def write(step: int, figures: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"step {step}  {shown}", flush=True)

    return write


def _jsonl(folder: Path) -> Sink:
    folder.mkdir(parents=True, exist_ok=True)

    def write(step: int, figures: Mapping[str, float]) -> None:
        # A line at a time: one that is whole survives whatever follows.
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")

    return write


def _tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PlanError(
            'to="tensorboard" needs the package tensorboard; pip install tensorboard'
        ) from None
    writer = SummaryWriter(str(folder))

    def write(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(folder: Path) -> Sink:
    try:
        wandb = import_module("wandb")
    except ImportError:
        raise PlanError('to="wandb" needs the package wandb; pip install wandb') from None
    run = wandb.run or wandb.init(dir=str(folder))

    def write(step: int, figures: Mapping[str, float]) -> None:
        run.log(dict(figures), step=step)

    return write


_SINKS: dict[str, Callable[[Path], Sink]] = {
    "console": _console,
    "jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}

"""A process with a fake CUDA that runs the cases it is told: `python -m tests.fake_cuda.child`.

It reads the name of a case from each line of its input, and writes a line of JSON for each: what
went wrong (null: nothing), and where the host waited in the second step.
"""

from __future__ import annotations

import tests.fake_cuda.device  # noqa: F401  # isort: skip

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

import planner
from planner.integrations.prepare import Loss
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.checkpoint.checkpoints import Checkpoints
from planner.runtime.checkpoint.staging import Copies
from planner.runtime.proofs.adam_of_rows import AdamOfRows
from planner.runtime.stage.compiled import graphs
from planner.runtime.stage.compiled.kernels import op_by_op
from planner.runtime.step.engine import Engine
from tests import opaque_models
from tests.builders import PlainGPT, PlainLayer, TinyModel, gpt_batch
from tests.captures import capture_module
from tests.fake_cuda.cases import CASES, Case
from tests.fake_cuda.ranks import fake_batch, fake_engine, fake_start
from tests.runtime import test_complex, test_sparse_tables
from tests.runtime.scenarios import models


class DropLayer(PlainLayer):
    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class DropGPT(PlainGPT):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.layers = nn.ModuleList(DropLayer() for _ in range(2))


def _experts() -> nn.Module:
    return opaque_models.Chain(opaque_models.LoopedExperts, num=2)


@cache
def _models() -> dict[str, TinyModel]:
    towers = test_sparse_tables
    more = [
        TinyModel("dropout-gpt", DropGPT, gpt_batch),
        TinyModel("experts", _experts, opaque_models.batch),
        TinyModel("sparse-towers", partial(towers.Towers, True), _single),
        TinyModel("dense-towers", partial(towers.Towers, False), _single),
        TinyModel("complex", test_complex.Waves, test_complex.batch),
    ]
    return models() | {tiny.name: tiny for tiny in more}


def _single(size: int) -> dict[str, torch.Tensor]:
    data = test_sparse_tables.batch(size)
    return data | {"taken": data["taken"].float()}


@cache
def _captured(name: str, precision: str) -> tuple[nn.Module, ModelGraph]:
    tiny = _models()[name]
    module = tiny.build()
    two, three = tiny.batch(2), tiny.batch(3)
    graph = capture_module(module, two, three, loss=tiny.loss, name=name, precision=precision)
    return module, graph


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    _, graph = _captured(case.model, case.precision)
    plan = default_plan(graph, **case.layout)
    changes = {"precision": case.precision, **case.plan}
    if case.offload:
        away = [stage.model_copy(update={"activations_on_host": True}) for stage in plan.stages]
        changes["stages"] = tuple(away)
    return plan.model_copy(update=changes)


def run(case: Case, rank: int) -> dict[str, int]:
    """Run a case on a rank; return where the host waited in its second step."""
    module, graph = _captured(case.model, case.precision)
    plan = plan_of(case)
    rank %= plan.world_size
    if case.does in _STARTS:
        with fake_start(plan, [graph], rank):
            _STARTS[case.does](plan, _models()[case.model])
        return {}
    # (Torch's own optimizer of rows makes a sparse tensor, which has no fake form on CUDA.)
    of_rows = partial(AdamOfRows, holding=nullcontext, fused=True)
    fused = partial(torch.optim.AdamW, fused=True) if case.fused else None
    chosen = of_rows if case.model == "sparse-towers" else fused
    options = dict(case.options)
    if plan.is_compiled:  # a compiler takes no shapes without values
        options["compiler"] = op_by_op
    with (
        # (Without values a tensor has no address.)
        patch.object(graphs, "_address", lambda tensor: tensor.untyped_storage()._cdata),
        fake_engine(plan, graph, module, rank, optimizer=chosen, **options) as (engine, host),
    ):
        batch = fake_batch(plan)
        engine.step(batch)
        with host.counting():
            engine.step(batch)
        waits = dict(host.waits)
        _check_devices(engine, plan)
        _CALLS[case.does](engine, batch)
    return waits


def _check_devices(engine: Engine, plan: Plan) -> None:
    """What is trained lies where the plan puts it, its gradient too."""
    for name, copies in engine.state.trained.by_name().items():
        for param in copies:
            assert param.device.type == "cuda" or plan.optimizer_on_host, name
            assert param.grad is None or param.grad.device == param.device, name


# -- calls ----------------------------------------------------------------------------------


def _evaluates(engine: Engine, batch: Any) -> None:
    assert engine.evaluate(batch).device.type == "cuda"
    engine.forward(batch)
    engine.step(batch)


def _accumulates(engine: Engine, batch: Any) -> None:
    engine.step(batch, update=False)
    engine.step(batch)


def _fetches(engine: Engine, batch: Any) -> None:
    engine.step(batch, fetch=["layers.0"])
    engine.intermediates(batch, ["layers.0"])


def _averages(engine: Engine, batch: Any) -> None:
    for decay in (0.9, None):
        engine.average = None
        average = engine.average_weights(decay=decay)
        engine.step(batch)
        with average.applied():
            engine.evaluate(batch)


def _gathers(engine: Engine, batch: Any) -> None:
    engine.full_state_dict()
    engine.full_gradients()


def _loads(engine: Engine, batch: Any) -> None:
    """Weights of a file, which have values, as no other file can be written here."""
    with tempfile.TemporaryDirectory() as folder, _disable_current_modes():
        path = Path(folder) / "weights.pt"
        torch.save(_captured(engine.plan.model.name, "model")[0].state_dict(), path)
        engine.load_weights(path)


def _saves(engine: Engine, batch: Any) -> None:
    """Up to copies in host memory: without values there is nothing to write."""

    def write(self: Checkpoints, folder: Path, keep: int, items: Any, copies: Copies, *_: Any):
        copies.finish()

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Checkpoints, "_write", write),
        patch.object(type(engine.mesh), "open_host_group", lambda mesh: mesh.control),
    ):
        for _ in range(2):
            engine.save(folder)
            engine.step(batch)
        engine.wait_for_save()


def _trains_on_less(engine: Engine, batch: Any) -> None:
    engine.step({path: tensor[:5] for path, tensor in batch.items()})


def _trains_from_a_loader(engine: Engine, batch: Any) -> None:
    for number, part in enumerate(engine.loader(_Texts(), num_workers=0)):
        engine.step(part)
        if number == 1:
            break


class _Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {name: tensor[0] for name, tensor in gpt_batch(1).items()}


_CALLS: dict[str, Callable[[Engine, Any], None]] = {
    "nothing": lambda engine, batch: None,
    "evaluates": _evaluates,
    "accumulates": _accumulates,
    "fetches": _fetches,
    "averages": _averages,
    "gathers": _gathers,
    "loads": _loads,
    "saves": _saves,
    "trains on less": _trains_on_less,
    "trains from a loader": _trains_from_a_loader,
}


# -- starts ---------------------------------------------------------------------------------


def _loss(value: torch.Tensor) -> Loss:
    """A loss on the CPU: a fake tensor can't be made one of a subclass."""
    assert value.device.type == "cuda"
    with _disable_current_modes():
        return torch.Tensor._make_subclass(Loss, torch.ones(()), True)  # type: ignore[return-value]


def _prepare(plan: Plan, tiny: TinyModel) -> None:
    module = tiny.build()
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    loader = torch.utils.data.DataLoader(_Texts(), batch_size=plan.global_batch)
    model, optimizer, loader, scheduler = planner.prepare(
        plan, module, optimizer, loader, scheduler
    )
    for number, part in enumerate(loader):
        with patch.object(Loss, "of", _loss):
            loss = model(**part)
        with _disable_current_modes():
            loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == 1:
            break


def _trainer(plan: Plan, tiny: TinyModel) -> None:
    from planner.integrations.huggingface import PlannerTrainer
    from tests.integrations.test_huggingface import Text, arguments

    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(
            Path(folder), use_cpu=False, max_steps=2, per_device_train_batch_size=plan.global_batch
        )
        trainer = PlannerTrainer(tiny.build(), settings, train_dataset=Text(), plan=plan)
        trainer.train()


_STARTS: dict[str, Callable[[Plan, TinyModel], None]] = {"prepare": _prepare, "trainer": _trainer}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Answers alone go to the output; what else is printed goes with the errors.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        name, rank = json.loads(line)
        failed, waits = None, {}
        try:
            waits = run(CASES[name], rank)
        except BaseException:
            failed = traceback.format_exc()
        answers.write(json.dumps({"failed": failed, "waits": waits}) + "\n")


if __name__ == "__main__":
    main()

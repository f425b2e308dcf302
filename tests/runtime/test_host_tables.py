"""M25: tables on the host, of which devices get the rows they look up, train as in one process."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.errors import ModelError, PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, train_beside
from tests.runtime.test_sparse_tables import Towers, batch, optimizers, seeded_batch
from tests.spawn import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
TABLES = ("users.weight", "items.weight")


def built(sparse: bool) -> Towers:
    torch.manual_seed(0)
    return Towers(sparse).double()


def plan_of(sparse: bool, tables: tuple[str, ...] = TABLES, **options) -> Plan:
    on_host = {"tables_on_host": tables, "optimizer_on_host": options.pop("on_host", False)}
    size = 4 // options.get("dp", 1)
    graph = capture_module(built(sparse), batch(2), batch(3), name="towers")
    plan = default_plan(graph, num_microbatches=2, microbatch_size=size, **options)
    return plan.model_copy(update=on_host)


def stepping(module: Towers, sparse: bool) -> list[torch.optim.Optimizer]:
    """Lazy Adam for sparse tables; without, AdamW for all, decay of every row included."""
    if sparse:
        return optimizers(module)
    return [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)]


def train(cases: list[tuple[bool, Plan]], folder: str) -> list[float]:
    """How far losses and parameters are from one process, a checkpoint in between."""
    return [_train(*case, f"{folder}/{number}") for number, case in enumerate(cases)]


def _train(sparse: bool, plan: Plan, folder: str) -> float:
    def make(module: Towers) -> list[torch.optim.Optimizer]:
        return stepping(module, sparse)

    alone, gap = OneProcess(built(sparse), make), 0.0
    for part in range(2):
        module = built(sparse)
        engine = planner.apply(plan, module, optimizer=make(module), max_grad_norm=9)
        if part:
            engine.load(folder)
        batches = [seeded_batch(plan, 10 * part + step) for step in range(2)]
        gap = max(gap, train_beside(engine, alone, batches, gap=gap_to_largest).largest)
        engine.evaluate(batches[-1])
        gap = max(gap, gap_to_largest(engine.full_state_dict(), alone.parameters()))
        engine.save(folder)
        engine.close()
    return gap


def check(ranks: int, cases: list[tuple[bool, Plan]], folder) -> None:
    for found in run_ranks(train, ranks, cases, str(folder)):
        for (sparse, plan), gap in zip(cases, found, strict=True):
            assert gap < 1e-12, (sparse, plan.degrees, plan.pp, plan.zero_stage)


def test_they_equal_one_process_on_two_ranks(tmp_path):
    cases = [
        (True, plan_of(True, dp=2)),
        (False, plan_of(False, dp=2, zero_stage=3)),
        (True, plan_of(True, tp=2, on_host=True)),
        (False, plan_of(False, ("items.weight",), pp=2, recompute="full")),
    ]
    check(2, cases, tmp_path)


def test_they_equal_one_process_on_four_ranks(tmp_path):
    cases = [
        (True, plan_of(True, dp=2, tp=2)),
        (False, plan_of(False, dp=2, pp=2, vpp=2, schedule="interleaved_1f1b")),
    ]
    check(4, cases, tmp_path)


def in_bf16() -> list[Plan]:
    """Plans of precision bf16 with tables on devices and on the host, masters and all in reach."""
    graph = capture_module(built(True).float(), single(2), single(3), precision="bf16")
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2, dp=2)
    changes = [
        {},
        {"tables_on_host": TABLES},
        {"zero_stage": 1},
        {"zero_stage": 3, "tables_on_host": TABLES},
        {"optimizer_on_host": True, "tables_on_host": TABLES},
    ]
    return [plan.model_copy(update={"precision": "bf16", **change}) for change in changes]


def single(size: int) -> dict[str, torch.Tensor]:
    data = batch(size)
    return data | {"taken": data["taken"].float()}


def losses_of(plans: list[Plan]) -> list[list[float]]:
    return [_losses(plan) for plan in plans]


def _losses(plan: Plan) -> list[float]:
    module = built(True).float()
    engine = planner.apply(plan, module, optimizer=optimizers(module))
    torch.manual_seed(0)
    return [engine.step(single(plan.global_batch)).item() for _ in range(3)]


def test_in_bf16_masters_of_tables_step_wherever_they_are():
    """The same bits on devices and on the host, as devices are CPUs here; near those of fp32."""
    alone = OneProcess(built(True).float(), optimizers)
    torch.manual_seed(0)
    expected = [alone.step(single(8)) for _ in range(3)]
    for found in run_ranks(losses_of, 2, in_bf16()):
        assert all(losses == found[0] for losses in found)
        assert found[0] == pytest.approx(expected, rel=1e-2)


def whole_rows(plan: Plan) -> str:
    """What is said of an optimizer that reads others of its parameter, dense gradients given."""
    try:
        planner.apply(plan, built(False), optimizer=torch.optim.Adafactor)
    except ModelError as error:
        return str(error)
    return ""


def test_columns_of_a_table_are_refused_by_optimizers_of_whole_parameters():
    plan = plan_of(False, tp=2)
    for said in run_ranks(whole_rows, 2, plan):
        assert "Adafactor reads whole parameters, and the plan cuts" in said


def test_a_device_has_no_memory_of_a_table_on_the_host():
    module = built(True)
    graph = capture_module(module, batch(2), batch(3), name="towers")
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2)
    plan = plan.model_copy(update={"tables_on_host": TABLES})
    engine = planner.apply(plan, module, optimizer=optimizers(module))
    held = {n: p for s in engine.stages.values() for n, p in s.named_params().items()}
    for name in TABLES:
        assert held[name].untyped_storage().nbytes() == held[name].element_size()
    engine.step(batch(4))


def test_what_is_no_table_is_refused():
    plan = plan_of(True, ("out.weight",))
    with pytest.raises(PlanError, match=r"keeps out.weight on the host, which is no trained table"):
        planner.apply(plan, built(True), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

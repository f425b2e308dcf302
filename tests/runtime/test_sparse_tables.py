"""M25: tables with sparse gradients train as in one process: only touched rows change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.errors import ModelError, PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, train_beside
from tests.runtime.test_verify_faults import verify_here
from tests.spawn import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, WIDTH, STEPS = 24, 4, 3


class Towers(nn.Module):
    """Two tables; one is looked up twice, has a padding row, and is read by two stages."""

    def __init__(self, sparse: bool = True, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, width, sparse=sparse)
        self.items = nn.Embedding(rows, width, sparse=sparse, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, seen: Tensor, item: Tensor, taken: Tensor) -> Tensor:
        x = self.users(user) + self.items(seen).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.cat([x, self.items(item)], -1)
        return F.binary_cross_entropy_with_logits(self.out(x).squeeze(-1), taken)


def batch(size: int) -> dict[str, Tensor]:
    """Numbers of the lower half of the rows, some of them several times; 0 is padding."""
    user, item = torch.randint(0, ROWS // 2, (2, size))
    seen = torch.randint(0, ROWS // 2, (size, 3))
    return {"user": user, "seen": seen, "item": item, "taken": (item % 2).double()}


def optimizers(module: Towers) -> list[torch.optim.Optimizer]:
    tables = [module.users.weight, module.items.weight]
    others = [p for n, p in module.named_parameters() if n not in ("users.weight", "items.weight")]
    return [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.AdamW(others, lr=1e-2, eps=1e-3)]


def built() -> Towers:
    torch.manual_seed(0)
    return Towers().double()


def plan_of(**options: Any) -> Plan:
    size = 4 // options.get("dp", 1)
    graph = capture_module(built(), batch(2), batch(3), name="towers")
    return default_plan(graph, num_microbatches=2, microbatch_size=size, **options)


def train(plans: list[Plan], clip: float | None) -> list[tuple[float, bool]]:
    """How far each is from one process, and whether rows that nothing looks up are as before."""
    return [_train(plan, clip) for plan in plans]


def _train(plan: Plan, clip: float | None) -> tuple[float, bool]:
    module = built()
    alone = OneProcess(module, optimizers, clip=lambda alone: clipped(alone, clip))
    engine = planner.apply(plan, module, optimizer=optimizers(module), max_grad_norm=clip)
    gaps = train_beside(
        engine, alone, [seeded_batch(plan, step) for step in range(STEPS)], gap=gap_to_largest
    )
    state, first = engine.full_state_dict(), built().state_dict()
    untouched = all(
        torch.equal(state[name][ROWS // 2 :], first[name][ROWS // 2 :])
        for name in (("users.weight", "items.weight") if state else ())
    )
    return gaps.largest, untouched


def seeded_batch(plan: Plan, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return batch(plan.global_batch)


def clipped(module: nn.Module, most: float | None) -> None:
    """As `clip_grad_norm_`, which takes no sparse gradients."""
    if most is None:
        return
    grads = [(p.grad.coalesce() if p.grad.is_sparse else p.grad) for p in module.parameters()]
    norm = torch.stack([(g.values() if g.is_sparse else g).norm() for g in grads]).norm()
    for param, grad in zip(module.parameters(), grads, strict=True):
        param.grad = grad * min(1.0, most / (norm + 1e-6))


@pytest.mark.parametrize("clip", [None, 0.01])
def test_they_equal_one_process_on_two_ranks(clip):
    plans = [plan_of(dp=2), plan_of(tp=2), plan_of(pp=2), plan_of(dp=2, zero_stage=3)]
    for found in run_ranks(train, 2, plans, clip):
        for plan, (gap, is_untouched) in zip(plans, found, strict=True):
            assert gap < 1e-12, (plan.degrees, plan.pp)
            assert is_untouched


def test_they_equal_one_process_on_four_ranks():
    plans = [
        plan_of(dp=2, tp=2),
        plan_of(dp=2, pp=2, vpp=2, schedule="interleaved_1f1b", recompute="full"),
    ]
    for found in run_ranks(train, 4, plans, None):
        for plan, (gap, is_untouched) in zip(plans, found, strict=True):
            assert gap < 1e-12, (plan.degrees, plan.pp)
            assert is_untouched


def test_they_go_on_from_a_checkpoint_under_another_plan_and_over_several_batches(tmp_path):
    plans = [plan_of(dp=2), plan_of(pp=2)]
    for first, second in run_ranks(resumed, 2, plans, tmp_path):
        assert max(first, second) < 1e-12


def resumed(plans: list[Plan], folder: Any) -> list[float]:
    """How far an update of two batches is from one process, before and after a change of plans."""
    alone, gaps = OneProcess(built(), optimizers), []
    for number, plan in enumerate(plans):
        module = built()
        engine = planner.apply(plan, module, optimizer=optimizers(module))
        if number:
            engine.load(folder)
        torch.manual_seed(number)
        batches = [batch(plan.global_batch) for _ in range(2)]
        for part in batches:
            engine.step(part, update=part is batches[-1])
        alone.update(batches)
        found = (engine.full_state_dict(), alone.parameters())
        of_gradients = (engine.full_gradients(), alone.gradients())
        gaps.append(max(gap_to_largest(*found), gap_to_largest(*of_gradients)))
        engine.evaluate(batches[0])
        engine.save(folder)
        engine.close()
    return gaps


def test_verify_proves_them():
    assert verify_here(built, batch).passed


def tied(module: Towers) -> Towers:
    module.items.weight = module.users.weight
    return module


class Scored(Towers):
    """Its users' table is a matrix in a product, too: the gradient is dense in one process."""

    def forward(self, user: Tensor, seen: Tensor, item: Tensor, taken: Tensor) -> Tensor:
        scores = self.users(user) @ self.users.weight.T
        return super().forward(user, seen, item, taken) + scores.square().mean()


def gradient_of(module: nn.Module, name: str = "users.weight") -> Tensor:
    data = batch(4)
    module(**data).backward()
    return dict(module.named_parameters())[name].grad


def one_rank(module: nn.Module, optimizer: Any) -> Any:
    graph = capture_module(module, batch(2), batch(3), name="towers")
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2)
    return planner.apply(plan, module, optimizer=optimizer)


def test_a_table_that_is_read_otherwise_has_a_dense_gradient_as_in_one_process():
    torch.manual_seed(0)
    assert not gradient_of(Scored().double()).is_sparse
    module = Scored().double()
    optimizer = [
        torch.optim.SparseAdam([module.items.weight]),
        torch.optim.AdamW([p for n, p in module.named_parameters() if n != "items.weight"]),
    ]
    one_rank(module, optimizer).step(batch(4))
    with pytest.raises(ModelError, match="those of all but tables"):
        one_rank(module := Scored().double(), optimizers(module))


def test_tables_that_are_tied_are_one_table():
    torch.manual_seed(0)
    module = tied(built())

    def two(module: nn.Module) -> list[torch.optim.Optimizer]:
        others = [p for n, p in module.named_parameters() if n != "users.weight"]
        return [torch.optim.SparseAdam([module.users.weight], lr=0.1), torch.optim.SGD(others)]

    alone = OneProcess(module, two)
    engine = one_rank(module, two(module))
    assert train_beside(engine, alone, [batch(4)], gap=gap_to_largest).largest < 1e-12


def test_what_can_t_be_is_refused_in_a_line():
    with pytest.raises(ModelError, match="AdamW takes no sparse gradients, such as that of users"):
        one_rank(built(), torch.optim.AdamW)
    with pytest.raises(ModelError, match="AdamW takes no sparse gradients"):
        one_rank(built(), None)
    graph = capture_module(built(), batch(2), batch(3), name="towers")
    plan = default_plan(graph, num_microbatches=1, microbatch_size=4)
    plan = plan.model_copy(update={"optimizer_on_host": True})
    with pytest.raises(PlanError, match=r"users.weight has a sparse gradient, and the plan"):
        planner.apply(plan, built(), optimizer=torch.optim.SGD)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_that_take_both_do(optimizer):
    module = built()
    alone = OneProcess(module, lambda module: optimizer(module.parameters(), lr=0.1))
    engine = one_rank(module, optimizer(module.parameters(), lr=0.1))
    batches = [seeded_batch(engine.plan, step) for step in range(2)]
    assert train_beside(engine, alone, batches, gap=gap_to_largest).largest < 1e-12

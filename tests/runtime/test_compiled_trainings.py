"""Trainings with compiled blocks are those of eager ones, to the bit: what plans put around blocks.

The graphs' own ops run, as in `test_compiled`; losses, an evaluation's too, are compared.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.stage.compiled.kernels import CompilerFailed, op_by_op
from planner.runtime.step.engine import Engine
from planner.runtime.step.update.values import ValuesError
from tests.spawn import run_ranks

VOCABULARY, SEQUENCE, HEADS = 64, 16, 4
DROPOUT = {"dropout": 0.1}
CASES = {
    "dropout": (DROPOUT, {"dp": 2}),
    "dropout on shards": (DROPOUT, {"tp": 2, "recompute": "full"}),
    "dropout made again": (DROPOUT, {"pp": 2, "recompute": "full"}),
    "dropout that stays eager": (DROPOUT, {"dp": 2, "recompute": "selective"}),
    "the last microbatch keeps all": (
        {},
        {"tp": 2, "recompute": "selective", "recompute_last": False},
    ),
    "adapters": ({"is_frozen": True}, {"pp": 2, "schedule": "zb_h1"}),
    "activations on the host": ({}, {"pp": 2, "activations_on_host": True}),
    "activations on the host, made again": (
        {},
        {"pp": 2, "recompute": "selective", "activations_on_host": True},
    ),
    "bf16, sharded": ({}, {"dp": 2, "zero_stage": 3, "precision": "bf16"}),
    "bf16": ({}, {"pp": 2, "precision": "bf16"}),
    "optimizer on the host": ({}, {"dp": 2, "zero_stage": 2, "optimizer_on_host": True}),
    "large weights": ({"width": 512}, {"pp": 2}),
    "large weights wait": ({"width": 512}, {"pp": 2, "schedule": "zb_h1"}),
    "two stages a rank": ({}, {"pp": 2, "vpp": 2, "schedule": "zb_v"}),
    "parts of sequences": ({}, {"cp": 2}),
}


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        b, s, h = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, 3, HEADS, h // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0, is_frozen: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(SEQUENCE, width) / 10)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if is_frozen:
            frozen = [self.token, self.layers[0], *(each.up for each in self.layers)]
            for part in frozen:
                part.requires_grad_(False)
            self.position.requires_grad_(False)

    def forward(self, ids):
        x = self.token(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"ids": torch.randint(VOCABULARY, (size, SEQUENCE), generator=generator)}


def planned(graph, choices) -> Plan:
    """A plan with the choices of a case; some are of its stages."""
    of_stages = {
        name: choices[name] for name in ("activations_on_host", "recompute_last") if name in choices
    }
    of_plan = {n: choices[n] for n in ("precision", "optimizer_on_host") if n in choices}
    layout = {n: v for n, v in choices.items() if n not in {*of_stages, *of_plan}}
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2, **layout)
    stages = tuple(stage.model_copy(update=of_stages) for stage in plan.stages)
    return Plan.model_validate(plan.model_copy(update={**of_plan, "stages": stages}).model_dump())


def losses_of(case: str) -> list[list[float]]:
    """On a rank: losses with either kernels, of whole batches, smaller ones, the second of which is
    compiled, and an evaluation; and what is fetched.
    """
    sizes, choices = CASES[case]
    found = []
    for kernels in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Model(**sizes)
        precision = choices.get("precision", "model")
        graph = capture_module(model, batch(2), batch(3), precision=precision)
        plan = planned(graph, choices).model_copy(update={"kernels": kernels})
        torch.manual_seed(1)
        engine = Engine(
            plan,
            graph,
            model,
            build_mesh(plan, torch.device("cpu")),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            compiler=op_by_op,
        )
        # (Sequences over tp are cut by samples here, so that all batches are alike.)
        fewer = plan.global_batch - ("tp" not in choices)
        given = (plan.global_batch, plan.global_batch, fewer, fewer)
        losses = [engine.step(batch(size)) for size in given]
        losses.append(engine.evaluate(batch(plan.global_batch)))
        losses.append(engine.step(batch(plan.global_batch), fetch=["layers.1"]))
        losses += [value.double().sum() for value in engine.fetched.values()]  # on rank 0
        found.append([float(loss) for loss in losses])
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_eager_blocks(case):
    eager, compiled = run_ranks(losses_of, 2, case)[0]
    assert len(eager) == 7
    assert eager == compiled


class Faulty(Model):
    def forward(self, ids):
        x = self.token(ids) + self.position
        return F.cross_entropy(self.head(torch.log(x - 100)).flatten(0, 1), ids.flatten())


def told_of_a_fault() -> list[str]:
    """On a rank: what is said of a value that is none, with either kernels."""
    found = []
    for kernels in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Faulty()
        graph = capture_module(model, batch(2), batch(3))
        plan = default_plan(graph, microbatch_size=2).model_copy(update={"kernels": kernels})
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = Engine(plan, graph, model, mesh, compiler=op_by_op, check_values=True)
        with pytest.raises(ValuesError) as raised:
            engine.step(batch(2))
        found.append(str(raised.value))
        engine.close()
    return found


def test_a_value_that_is_none_is_traced_to_its_op():
    eager, compiled = run_ranks(told_of_a_fault, 1)[0]
    assert "first in log" in eager
    assert compiled == eager


def told_of_sizes() -> str:
    """On a rank: what is said of batches of many sizes, each of which comes twice, of one of which
    the compiler fails at the first layer.
    """

    def failing_at_one(module):
        shapes = {tuple(n.meta["val"].shape) for n in module.graph.nodes if n.op == "placeholder"}
        if (1, SEQUENCE, 32) in shapes and (64, 32) in shapes:
            raise CompilerFailed("no")
        return op_by_op(module)

    torch.manual_seed(0)
    model = Model()
    graph = capture_module(model, batch(2), batch(3))
    plan = default_plan(graph, microbatch_size=12, num_microbatches=1)
    plan = plan.model_copy(update={"kernels": "compiled"})
    mesh = build_mesh(plan, torch.device("cpu"))
    engine = Engine(plan, graph, model, mesh, compiler=failing_at_one)
    with redirect_stderr(io.StringIO()) as told:
        for size in (12, 7, 7, *range(1, 12), *range(1, 12)):
            engine.evaluate(batch(size))
            engine.step(batch(size))
    sizes = {size.num_samples for _, size, _ in engine._programs._compiled}
    engine.close()
    assert sizes == {*range(1, 9), 12}
    return told.getvalue()


def test_what_is_not_compiled_is_told_once():
    assert run_ranks(told_of_sizes, 1)[0] == (
        "planner: eager kernels run in layers.*, head (no), in microbatches of 1 sample a rank\n"
        "planner: microbatches of 9 samples a rank, and further sizes, run op by op: 8 sizes "
        "beside the plan's are compiled (told once)\n"
    )

"""Recompute modes: bit for bit the same gradients, and the memory each is there for."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.ops.recompute_choice import default_ops
from planner.language.plan import ClassRecompute, Plan
from planner.runtime.process import collectives
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.step.engine import Engine
from tests.builders import HEADS, HIDDEN, PlainGPT, gpt_batch, label_batch, mlp_batch, tiny_models
from tests.captures import capture_module
from tests.spawn import run_ranks

MODES = {
    "always": ("full", True),
    "always but last": ("full", False),
    "selective": ("selective", True),
    "selective but last": ("selective", False),
}


class DroppingLayer(nn.Module):
    """Dropout before, inside and after attention: kept ops draw as well as repeated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(F.dropout(self.norm(x), 0.1)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.3)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class DroppingGPT(PlainGPT):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.layers = nn.ModuleList(DroppingLayer() for _ in range(2))


class LeakyNet(nn.Module):
    """A random slope, which autograd saves before it is drawn, as the last thing of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.rrelu(layer(x), 0.1, 0.9, training=True)
        return F.mse_loss(self.head(x), target)


CASES = {
    "leaky-mlp": (LeakyNet, mlp_batch),
    "gpt": (partial(PlainGPT, layers=2), gpt_batch),
    "dropping-gpt": (DroppingGPT, gpt_batch),
    "batchnorm-mlp": (tiny_models()["batchnorm-mlp"].build, mlp_batch),
    "resnet": (tiny_models()["resnet"].build, label_batch),
}


@cache
def captured(name: str) -> ModelGraph:
    build, batch = CASES[name]
    return capture_module(build(), batch(2), batch(3), name=name)


def in_mode(plan: Plan, recompute: str, recompute_last: bool = True) -> Plan:
    changes = {"recompute": recompute, "recompute_last": recompute_last}
    stages = tuple(stage.model_copy(update=changes) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def train_once(name: str, graph: ModelGraph, plan: Plan) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after one step from seed 0, on rank 0."""
    build, batch = CASES[name]
    torch.manual_seed(0)
    engine = Engine(plan, graph, build(), build_mesh(plan, torch.device("cpu")))
    loss = engine.step(batch(plan.global_batch))
    buffers = {n: t for n, t in engine.full_state_dict().items() if "running" in n}
    made = {"loss": loss, **buffers, **engine.full_gradients()}
    engine.close()  # another engine beside it would draw other numbers
    return made


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt", "1f1b"),
        ("dropping-gpt", "1f1b"),
        ("dropping-gpt", "zb_h1"),
        ("batchnorm-mlp", "1f1b"),
        ("resnet", "zb_h1"),
        ("leaky-mlp", "1f1b"),
    ],
)
def test_every_mode_gives_the_same_bits(alone, name, schedule):
    """G5, G6: gradients, masks drawn again, and running statistics moved once."""
    graph = captured(name)
    plan = default_plan(graph, microbatch_size=2, num_microbatches=3, schedule=schedule)
    expected = train_once(name, graph, plan)
    for label, mode in MODES.items():
        assert not different(train_once(name, graph, in_mode(plan, *mode)), expected), label


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_ops_gives_the_same_bits(alone, seed):
    """G5, G6: the plan names ops, not kinds of ops; here each is chosen by a coin."""
    graph = captured("dropping-gpt")
    coin = random.Random(seed)
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    expected = train_once("dropping-gpt", graph, plan)
    chosen = tuple(
        ClassRecompute(
            class_index=index, ops=tuple(op.name for op in program.ops if coin.random() < 0.5)
        )
        for index, program in enumerate(graph.classes)
    )
    plan = in_mode(plan, "selective").model_copy(update={"recomputed": chosen})
    assert not different(train_once("dropping-gpt", graph, plan), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_recompute_apart_give_the_same_bits(alone, seed, schedule):
    """G5, G6: each block's choice by a die, in one stage."""
    graph = captured("dropping-gpt")
    die = random.Random(seed)
    by_block = [die.choice(("none", "selective", "full")) for _ in graph.blocks]
    options = {"microbatch_size": 2, "num_microbatches": 3, "schedule": schedule}
    expected = train_once("dropping-gpt", graph, default_plan(graph, **options))
    plan = default_plan(graph, recompute=by_block, **options)
    assert len({*plan.recompute_by_block}) > 1
    assert not different(train_once("dropping-gpt", graph, plan), expected)


def forward_bytes(graph: ModelGraph, plan: Plan, model: str = "gpt") -> int:
    """What the forwards of a step leave alive; all run before the first backward."""
    run = dry_run(plan, graph, CASES[model][0])
    last = [m for m in run.samples if m.name.startswith("F")][-1]
    return last.end_bytes - run.rest_bytes


def test_bytes_kept_are_ordered():
    """G5: always < selective < never, and leaving out the last microbatch lies between."""
    graph = captured("gpt")
    plan = default_plan(graph, microbatch_size=2, num_microbatches=3, schedule="fthenb")
    found = {label: forward_bytes(graph, in_mode(plan, *mode)) for label, mode in MODES.items()}
    never = forward_bytes(graph, plan)
    assert found["always"] < found["always but last"] < never
    assert found["always"] < found["selective"] < found["selective but last"] < never


def test_every_block_recomputed_more_keeps_less():
    """G5: the first k blocks in full, the others selective."""
    graph = captured("gpt")
    n = len(graph.blocks)
    layers = [i for i, b in enumerate(graph.blocks) if len(graph.classes[b.class_index].ops) > 15]
    kept = [
        forward_bytes(
            graph,
            default_plan(
                graph,
                microbatch_size=2,
                num_microbatches=2,
                schedule="fthenb",
                recompute=["full"] * k + ["selective"] * (n - k),
            ),
        )
        for k in (layers[0], layers[0] + 1, layers[1] + 1)
    ]
    first, second = kept[0] - kept[1], kept[1] - kept[2]
    assert first == second > 0  # equal layers free equal bytes


def test_bytes_kept_by_choice():
    """G5: running the GELU again frees its output, and nothing else: its input is the result
    of a kept op.
    """
    graph = captured("gpt")
    index = next(i for i, c in enumerate(graph.classes) if len(c.ops) > 15)
    gelu = next(op.name for op in graph.classes[index].ops if "gelu" in op.target)
    others = [
        ClassRecompute(class_index=i, ops=()) for i in range(len(graph.classes)) if i != index
    ]
    plan = in_mode(default_plan(graph, microbatch_size=2, num_microbatches=1), "selective")

    def kept(*ops: str) -> int:
        chosen = (ClassRecompute(class_index=index, ops=ops), *others)
        return forward_bytes(graph, plan.model_copy(update={"recomputed": chosen}))

    num_layers = 2
    gelu_output = 2 * 16 * 4 * HIDDEN * 4  # samples, sequence, width, bytes of a float
    assert kept() - kept(gelu) == num_layers * gelu_output


def test_bytes_of_the_default_choice():
    """G5: a GPT layer keeps its input, q, k and v, attention's result with one statistic a
    row, the projection before the first residual, and the input of the GELU: not the last
    projection, which nothing made again reads before the second run is over.
    """
    graph = captured("gpt")
    layers = {}
    for count in (1, 2):
        model = capture_module(PlainGPT(count), gpt_batch(2), gpt_batch(3), name="gpt")
        plan = in_mode(default_plan(model, microbatch_size=2, num_microbatches=1), "selective")
        run = dry_run(plan, model, lambda count=count: PlainGPT(count))
        layers[count] = run.samples[0].end_bytes - run.rest_bytes
        layers[count] += model.num_params() * 4  # gradients of the step before are gone
    tokens = 2 * 16
    expected = tokens * (HIDDEN * (1 + 3 + 1 + 1 + 4) + HEADS) * 4
    assert layers[2] - layers[1] == expected
    assert len(default_ops(graph.classes[1])) == 13


def every_op(graph: ModelGraph) -> tuple[ClassRecompute, ...]:
    return tuple(
        ClassRecompute(class_index=index, ops=tuple(op.name for op in program.ops))
        for index, program in enumerate(graph.classes)
    )


def modes_on_ranks(graph: ModelGraph, layouts: dict[str, dict]) -> dict[str, list[str]]:
    """What differs from a run without recompute, by layout, mode and name.

    Also a word on it where a mode communicates more often than it should.
    """
    count = 0
    run_step = collectives.run_step

    def counted(*args: object) -> torch.Tensor:
        nonlocal count
        count += 1
        return run_step(*args)

    collectives.run_step = counted
    found = {}
    for label, layout in layouts.items():
        plan = default_plan(graph, microbatch_size=2, num_microbatches=2, **layout)
        counts = {}
        expected = train_once("dropping-gpt", graph, plan)
        counts["none"], count = count, 0
        modes = {mode: in_mode(plan, mode) for mode in ("full", "selective")}
        modes["every op"] = modes["selective"].model_copy(update={"recomputed": every_op(graph)})
        for mode, chosen in modes.items():
            made = train_once("dropping-gpt", graph, chosen)
            counts[mode], count = count, 0
            if different(made, expected):
                found[f"{label} {mode}"] = different(made, expected)
        if counts["selective"] != counts["none"] or counts["full"] < counts["none"]:
            found[label] = [f"collectives: {counts}"]
        if counts["every op"] != counts["full"]:
            found[label] = [f"every op chosen is not full recompute: {counts}"]
        if plan.tp > 1 and counts["full"] == counts["none"]:
            found[label] = ["full recompute without communication"]
    return found


def test_lowered_programs_and_split_backwards():
    """G5, G6, P11: collectives are not repeated, shards draw their own masks again, and weight
    gradients put aside or sharded (ZeRO 3) are those of a run that keeps everything.
    """
    layouts = {
        "tp2 zb_h1": {"tp": 2, "schedule": "zb_h1"},
        "pp2 zb_h1": {"pp": 2, "schedule": "zb_h1"},
        "dp2 zero3": {"dp": 2, "zero_stage": 3},
    }
    assert run_ranks(modes_on_ranks, 2, captured("dropping-gpt"), layouts)[0] == {}

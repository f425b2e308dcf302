"""The memory model against its referee: the real engine on fake tensors, rank by rank."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

from costmodel import CostCache, estimate
from costmodel.execution import find_execution
from planner.capture import capture_source
from planner.capture.modes.ledger import Ledger
from planner.capture.source.model_file import ModelSource
from planner.errors import PlanError
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import gathered_layout
from planner.language.lowering.propagate import propagate_graph
from planner.runtime.proofs.dryrun import LazyChunks, dry_run
from tests.builders import PlainGPT, build_hf, gpt_batch, telling_first, text_batch, tiny_models
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile
from tests.experts import ExpertModules, RoutedExperts, RoutedGPT
from tests.runtime.test_cuts_of_sequences import Way, cut_so


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def gpt(request):
    """A GPT of two layers, in slow tests of four: a dry run takes as long as it has ops."""
    model = replace(tiny_models()["gpt"], build=lambda: PlainGPT(layers=request.param))
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    return model, graph, CostCache(graph, CpuProfile())


BY_BLOCK = {"first": ("full", "none"), "last": ("selective", "full")}
"""What blocks recompute in turn."""

LAYOUTS = [
    {},
    {"recompute": "full"},
    {"pp": 2, "num_microbatches": 4},
    pytest.param({"pp": 2, "num_microbatches": 4, "schedule": "fthenb"}, marks=pytest.mark.slow),
    {"pp": 2, "vpp": 2, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
    {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
    {"recompute": "selective"},
    pytest.param(
        {"pp": 2, "num_microbatches": 4, "recompute": "selective"}, marks=pytest.mark.slow
    ),
    pytest.param({"recompute": "first"}, marks=pytest.mark.slow),
    {"recompute": "last", "num_microbatches": 3, "pp": 2},
    {
        "recompute": "first",
        "pp": 2,
        "vpp": 2,
        "num_microbatches": 4,
        "schedule": "interleaved_1f1b",
    },
    pytest.param(
        {"recompute": "first", "pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        marks=pytest.mark.slow,
    ),
    {"recompute": "first", "dp": 2, "zero_stage": 3},
    {"cp": 2},
    {"tp": 2, "pp": 2, "num_microbatches": 4, "by_stage": {"tp": (1, 2)}},
    {"dp": 2},
    {"tp": 2},
    {"dp": 2, "zero_stage": 1},
    pytest.param({"dp": 2, "zero_stage": 2}, marks=pytest.mark.slow),
    {"dp": 2, "zero_stage": 3},
    {"rp": 2, "dp": 2, "zero_stage": 3},
    pytest.param({"rp": 2, "dp": 2, "zero_stage": 1}, marks=pytest.mark.slow),
    pytest.param({"rp": 2, "dp": 2, "zero_stage": 2}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "zero_stage": 3, "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "zero_stage": 3, "recompute": "selective"}, marks=pytest.mark.slow),
    {"dp": 2, "pp": 2, "num_microbatches": 4, "zero_stage": 2},
    pytest.param({"cp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "tp": 2, "zero_stage": 1}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "pp": 2, "tp": 2, "num_microbatches": 4}, marks=pytest.mark.slow),
]


def assert_every_rank(plan, model, graph, costs, within=0.01, under=None):
    predicted = estimate(graph, costs.profile, plan, costs=costs).memory
    for pp_rank in range(plan.pp):
        rank = (pp_rank + 1) * plan.world_size // plan.pp - 1
        run = dry_run(plan, graph, model.build, rank=rank, on_gloo=True)
        error = float(predicted[pp_rank].tensor_bytes) / run.peak_bytes - 1
        assert -(under or within) < error < within, f"pp rank {pp_rank}: {error:+.2%}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predicted_tensors_are_those_of_the_dry_run(gpt, layout):
    """X10: every pp rank within 1%; of cp ranks the last, whose queries meet most keys."""
    model, graph, costs = gpt
    recompute = layout.get("recompute", "none")
    if recompute in BY_BLOCK:
        recompute = [BY_BLOCK[recompute][i % 2] for i in range(len(graph.blocks))]
    options = {"microbatch_size": 8, "num_microbatches": 2, **layout, "recompute": recompute}
    plan = default_plan(graph, **options)
    assert_every_rank(plan, model, graph, costs)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "recompute": "full"},
        pytest.param({"tp": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2, "num_microbatches": 4}, marks=pytest.mark.slow),
        {"tp": 2, "pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        pytest.param({"dp": 2, "tp": 2, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_waits_for_a_collective_is_in_the_dry_run(gpt, layout):
    """X10: with weight gradients beside collectives, every pp rank within 1%."""
    model, graph, costs = gpt
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    plan = plan.model_copy(update={"overlap": "input-gradients"})
    assert_every_rank(plan, model, graph, costs)


@pytest.mark.parametrize(
    "layout",
    [{}, {"recompute": "full"}, pytest.param({"recompute": "selective"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_gathers_in_pieces_hold_what_whole_ones_hold(gpt, layout):
    """X10: with sequences split between products, every pp rank within 1%."""
    model, graph, costs = gpt
    plan = default_plan(graph, tp=2, microbatch_size=8, num_microbatches=2, **layout)
    layouts = propagate_graph(graph, microbatch_size=8, axis_size=2, boundary=Shard(1))
    plan = plan.model_copy(update={"layouts": layouts, "gather_pieces": 4})
    assert_every_rank(plan, model, graph, costs)


class WideGPT(PlainGPT):
    """One layer, and a vocabulary whose logits are most of what a rank holds."""

    classes = 4096
    cap = 0.0

    def __init__(self):
        super().__init__(layers=1)
        width = self.head.in_features
        self.head = nn.Linear(width, self.classes, bias=False)

    def forward(self, ids, labels):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return F.cross_entropy(logits.float().view(-1, self.classes), labels.view(-1))


class CappedGPT(WideGPT):
    """The same with logits between -30 and 30."""

    cap = 30.0


@cache
def wide(precision, kind=WideGPT):
    return capture_module(kind(), gpt_batch(2), gpt_batch(3), name="wide-gpt", precision=precision)


@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 2, "recompute": "selective"},
        {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        {"dp": 2, "zero_stage": 3, "recompute": "full"},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "num_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_in_chunks_are_in_the_dry_run(layout, precision):
    """X10: every pp rank within 1%, where whole logits take the last one over a third more."""
    graph = wide(precision)
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    whole = plan.model_copy(update={"precision": precision})
    plan = whole.model_copy(update={"logit_rows": 24})
    model = replace(tiny_models()["gpt"], build=WideGPT)
    assert_every_rank(plan, model, graph, costs)
    most, least = (
        float(estimate(graph, costs.profile, each, costs=costs).memory[-1].tensor_bytes)
        for each in (whole, plan)
    )
    assert most > 1.3 * least


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_whole_logits_of_a_divided_vocabulary_are_in_the_dry_run(precision):
    """X10: within 1%. Beside the logits there is one tensor as large, in fp32."""
    graph = wide(precision)
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, tp=2, microbatch_size=8, num_microbatches=2)
    plan = plan.model_copy(update={"precision": precision})
    assert_every_rank(plan, replace(tiny_models()["gpt"], build=WideGPT), graph, costs)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "recompute": "selective"},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_in_chunks_of_compiled_blocks_are_in_the_dry_run(layout):
    """X10: within 4%, as compiled blocks are; whole logits take over a third more."""
    graph = wide("model")
    costs = CostCache(graph, CpuProfile(), execution=find_execution("ours-compiled"))
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    whole = plan.model_copy(update={"kernels": "compiled"})
    plan = whole.model_copy(update={"logit_rows": 24})
    model = replace(tiny_models()["gpt"], build=WideGPT)
    assert_every_rank(plan, model, graph, costs, within=0.04)
    most, least = (
        float(estimate(graph, costs.profile, each, costs=costs).memory[-1].tensor_bytes)
        for each in (whole, plan)
    )
    assert most > 1.3 * least


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_capped_logits_in_chunks_are_in_the_dry_run(precision):
    """X10: with what the backward through a tanh has of each logit."""
    graph = wide(precision, CappedGPT)
    plan = default_plan(graph, tp=2, microbatch_size=8, num_microbatches=2)
    plan = plan.model_copy(update={"precision": precision, "logit_rows": 24})
    model = replace(tiny_models()["gpt"], build=CappedGPT)
    assert_every_rank(plan, model, graph, CostCache(graph, CpuProfile()))


def test_what_a_second_run_might_read_stays_to_the_end_of_the_first():
    """X10: whole logits in bf16, which a view reads that is made again, beside their probabilities;
    7% of this rank.
    """
    graph = wide("bf16")
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, tp=2, recompute="selective", microbatch_size=8, num_microbatches=2)
    plan = plan.model_copy(update={"precision": "bf16"})
    model = replace(tiny_models()["gpt"], build=WideGPT)
    assert_every_rank(plan, model, graph, costs)


@pytest.mark.parametrize(
    "layout",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        pytest.param({"dp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_blocks_hold_what_their_graphs_do(gpt, layout):
    """X10: at most 4% above graphs that run op by op, where all that a kernel fuses has memory, and
    10% below: forwards are walked kernel by kernel.
    """
    model, graph, _ = gpt
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    plan = plan.model_copy(update={"kernels": "compiled"})
    costs = CostCache(graph, CpuProfile(), execution=find_execution("ours-compiled"))
    assert_every_rank(plan, model, graph, costs, within=0.04, under=0.1)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        pytest.param({"tp": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2, "schedule": "zb_h1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weight_gradients_of_compiled_blocks_beside_collectives(gpt, layout):
    """X10: their factors go at the collective, where others stay to the end of the block."""
    model, graph, _ = gpt
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    plan = plan.model_copy(update={"kernels": "compiled", "overlap": "input-gradients"})
    costs = CostCache(graph, CpuProfile(), execution=find_execution("ours-compiled"))
    assert_every_rank(plan, model, graph, costs, within=0.04, under=0.1)


@cache
def routed(precision="model", kind=RoutedExperts):
    batches = gpt_batch(2), gpt_batch(3)
    module = RoutedGPT(kind=kind, bias=True)
    graph = capture_module(module, *batches, name="routed", precision=precision)
    # A dry run has no values: each rank gets as many rows as it sends.
    even = replace(find_execution("ours-eager"), expert_imbalance=0.0)
    return graph, CostCache(graph, CpuProfile(), execution=even)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "recompute": "selective"},
        {"dp": 4, "ep": 4, "zero_stage": 1},  # each rank has other experts, which nobody shards
        {"dp": 4, "ep": 4, "zero_stage": 1, "precision": "bf16"},
        {"dp": 4, "ep": 4, "zero_stage": 1, "precision": "fp16"},
        pytest.param(
            {"dp": 4, "ep": 2, "zero_stage": 1, "precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"dp": 4, "ep": 4, "zero_stage": 3, "precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param({"dp": 4, "ep": 4, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_on_ranks_of_their_own_hold_what_the_dry_run_does(layout):
    """N7: a rank's own experts, rows on their way, and shards; within 0.5%."""
    choices = dict(layout)
    precision = choices.pop("precision", "model")
    graph, costs = routed(precision)
    plan = default_plan(graph, microbatch_size=8, num_microbatches=2, **choices)
    plan = plan.model_copy(update={"precision": precision})
    assert_as_the_dry_run(plan, graph, costs, RoutedExperts)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4, "ep": 2, "zero_stage": 3, "precision": "bf16"},
        pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 4, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_of_modules_hold_what_the_dry_run_does(layout):
    """N7: of each parameter of its own experts, and of their copies in one tensor; of the last
    rank, which has other experts than the first; within 0.5%.
    """
    choices = dict(layout)
    precision = choices.pop("precision", "model")
    graph, costs = routed(precision, ExpertModules)
    plan = default_plan(graph, microbatch_size=8, num_microbatches=2, **choices)
    plan = plan.model_copy(update={"precision": precision})
    assert_as_the_dry_run(plan, graph, costs, ExpertModules)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2, "recompute": "selective"},
        pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "ep": 4}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "kind", [ExpertModules, pytest.param(RoutedExperts, marks=pytest.mark.slow)]
)
def test_gathered_tokens_hold_what_the_dry_run_does(kind, layout):
    """N7: the tokens of all ranks while copies are picked, and the sums of all; within 0.1%."""
    graph, costs = routed(kind=kind)
    plan = default_plan(graph, microbatch_size=8, num_microbatches=2, **layout)
    found = (gathered_layout(program, at) for at, program in enumerate(graph.classes))
    layouts = tuple(each for each in found if each is not None)
    plan = plan.model_copy(update={"layouts": (*plan.layouts, *layouts)})
    assert_as_the_dry_run(plan, graph, costs, kind, rel=0.001)


def assert_as_the_dry_run(plan, graph, costs, kind, rel=0.005):
    (predicted,) = estimate(graph, costs.profile, plan, costs=costs).memory
    rank = plan.world_size - 1
    run = dry_run(plan, graph, lambda: RoutedGPT(kind=kind, bias=True), rank=rank, on_gloo=True)
    assert float(predicted.tensor_bytes) == pytest.approx(run.peak_bytes, rel=rel)


def windowed():
    """A model whose attention is told of a window, as (build, captured graph)."""
    transformers = pytest.importorskip("transformers")
    length = 64
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
        sliding_window=16,
    )  # fmt: skip

    def build() -> torch.nn.Module:
        return transformers.MistralForCausalLM(config)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return build, capture_module(build(), batch(2), batch(3))


@pytest.mark.parametrize(
    "layout", [{}, {"cp": 2}, pytest.param({"recompute": "full"}, marks=pytest.mark.slow)], ids=str
)
def test_attention_that_is_told_of_a_window_takes_tiles(layout):
    """N9: no pairs are saved, and tiles are there while they are computed; of the last rank of cp,
    which has most keys, within 0.1%.
    """
    build, graph = windowed()
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, microbatch_size=8, num_microbatches=2, **layout)
    (predicted,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, build, rank=plan.world_size - 1, on_gloo=True)
    assert float(predicted.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        (Way("ring"), {"cp": 4}),
        pytest.param(Way("ring", 2), {"cp": 2}, marks=pytest.mark.slow),
        pytest.param(
            Way("ring", 2, mirrored=True), {"cp": 4, "recompute": "full"}, marks=pytest.mark.slow
        ),
        pytest.param(Way("queries", 2), {"cp": 2}, marks=pytest.mark.slow),
        pytest.param(Way("ring", 2, mirrored=True), {"cp": 2, "hp": 2}, marks=pytest.mark.slow),
        pytest.param(Way("queries"), {"cp": 2, "hp": 2}, marks=pytest.mark.slow),
        pytest.param(Way("queries", 2, mirrored=True), {"cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rounds_of_a_ring_hold_what_the_dry_run_does(way, layout):
    """B10, N9: parts on their way and their gradients, tiles of pieces; within 0.1%."""
    build, graph = windowed()
    costs = CostCache(graph, CpuProfile())
    plan = cut_so(graph, way, num_microbatches=2, **layout)
    (predicted,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, build, rank=plan.world_size - 1, on_gloo=True)
    assert float(predicted.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.001)


class Wide(nn.Module):
    """Blocks whose backward is highest at an op between two wide tensors."""

    def __init__(self, between):
        super().__init__()
        self.between, self.first = between, nn.Linear(4, 16)
        self.up = nn.ModuleList(nn.Linear(16, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = down(self.between(up(x)))
        return x.square().mean()


@pytest.mark.parametrize(
    "between",
    [lambda p: p * p, lambda p: p.tanh() - p, lambda p: p - p.tanh(), lambda p: p + p * p],
    ids=["p * p", "tanh(p) - p", "p - tanh(p)", "p + p * p"],
)
def test_each_reading_of_a_tensor_makes_a_gradient(between):
    """X10: autograd makes two for p * p and adds them up; that of a difference's second term is
    the arriving one negated, not itself.
    """
    batches = (torch.randn(size, 64, 4) for size in (2, 3))
    graph = capture_module(Wide(between), *batches)
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, microbatch_size=4, num_microbatches=2)
    (predicted,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, lambda: Wide(between), on_gloo=True)
    assert float(predicted.tensor_bytes) == pytest.approx(run.peak_bytes, rel=1e-4)


def test_activations_of_the_last_microbatch_are_whole(gpt):
    """recompute_last=False: the step's last microbatch keeps what recomputation spares."""
    model, graph, costs = gpt
    plan = default_plan(graph, microbatch_size=8, num_microbatches=2, recompute="full")
    stage = plan.stages[0].model_copy(update={"recompute_last": False})
    plan = plan.model_copy(update={"stages": (stage,)})
    (parts,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, model.build)
    assert float(parts.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.01)


def test_1f1b_against_fthenb_peaks(gpt):
    """P18: the ratio of the two schedules' peaks, predicted within 2% of the dry run's."""
    model, graph, costs = gpt
    really, predicted = {}, {}
    for schedule in ("1f1b", "fthenb"):
        plan = default_plan(graph, pp=2, microbatch_size=8, num_microbatches=5, schedule=schedule)
        memory = estimate(graph, costs.profile, plan, costs=costs).memory
        predicted[schedule] = max(float(parts.tensor_bytes) for parts in memory)
        runs = (dry_run(plan, graph, model.build, rank=r, on_gloo=True) for r in range(2))
        really[schedule] = max(run.peak_bytes for run in runs)
    assert really["1f1b"] < 0.6 * really["fthenb"]
    assert predicted["1f1b"] / predicted["fthenb"] == pytest.approx(
        really["1f1b"] / really["fthenb"], rel=0.02
    )


def test_a_timeline_names_its_jobs_and_frees_what_it_kept(gpt):
    model, graph, _ = gpt
    plan = default_plan(graph, pp=2, microbatch_size=2, num_microbatches=2)
    run = dry_run(plan, graph, model.build, rank=0)
    assert [m.name for m in run.samples] == ["F0.0", "F0.1", "B0.0", "B0.1", "REDUCE", "O"]
    forward, *_, update = run.samples
    assert forward.end_bytes > run.rest_bytes - graph.num_params() * 4
    assert update.end_bytes == run.rest_bytes + 4  # the loss, which ranks sum meanwhile
    assert not dist.is_initialized()


def test_a_rank_that_is_not_there(gpt):
    model, graph, _ = gpt
    plan = default_plan(graph, microbatch_size=2, num_microbatches=1)
    with pytest.raises(PlanError, match="rank 3 is not in the plan, which has 1 ranks"):
        dry_run(plan, graph, model.build, rank=3)


def test_a_plan_for_thousands_runs_on_one_machine(gpt):
    """A rank in the middle of 1,024: the other ranks need not exist."""
    model, graph, _ = gpt
    plan = default_plan(graph, dp=128, tp=4, pp=2, microbatch_size=1, num_microbatches=2)
    run = dry_run(plan, graph, model.build, rank=777)
    assert run.pp_rank == 1
    assert run.peak_bytes > run.rest_bytes


def test_a_dry_run_takes_as_many_ops_on_any_number_of_ranks(gpt, monkeypatch):
    """ZeRO 3 on 512 ranks made 512 views of each parameter, twice: Llama-3-405B took minutes."""
    model, graph, _ = gpt
    ops = []
    watch = Ledger.__torch_dispatch__

    def counted(self, func, *rest, **more):
        ops.append(func)
        return watch(self, func, *rest, **more)

    monkeypatch.setattr(Ledger, "__torch_dispatch__", counted)
    numbers = []
    for dp in (8, 512):
        plan = default_plan(graph, dp=dp, microbatch_size=1, num_microbatches=1, zero_stage=3)
        dry_run(plan, graph, model.build)
        numbers.append(len(ops))
        ops.clear()
    assert numbers[1] == pytest.approx(numbers[0], rel=0.05)


@pytest.mark.parametrize("shape", [(7, 3), (8, 2), (1, 4), (5,), (0, 3)])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 16])
def test_chunks_made_one_by_one_are_those_that_fsdp_makes_at_once(shape, num_chunks):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    at_once = _fsdp_param._chunk_with_empty(whole, num_chunks, dim=0)
    for index, chunk in enumerate(at_once):
        single = LazyChunks(whole, num_chunks, 0)[index]
        assert single.shape == chunk.shape
        assert torch.equal(single, chunk)


@pytest.fixture(scope="module")
def gpt_bf16():
    model = tiny_models()["gpt"]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), name="gpt", precision="bf16"
    )
    return model, graph, CostCache(graph, CpuProfile())


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_bf16_with_fp32_masters(gpt_bf16, layout):
    """V14, X10: weights in bf16, sums of gradients, masters and state in fp32; with ZeRO the
    masters are what is sharded."""
    model, graph, costs = gpt_bf16
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    plan = plan.model_copy(update={"precision": "bf16"})
    (parts,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, model.build)
    assert float(parts.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.01)


class CastModel(torch.nn.Module):
    """Tied, with a tensor that is no buffer; small, as it is captured for each case."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(64, 32)
        self.middle = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.token.weight
        self.scale = torch.tensor(1.0)

    def forward(self, ids, labels):
        x = torch.relu(self.middle(self.token(ids) * self.scale))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def bf16_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return CastModel()
    finally:
        torch.set_default_dtype(before)


def initialized(module):
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight, std=0.02)


def of_values():
    module = CastModel()
    assert module.head.weight.abs().max().item() > 0
    return module.to(torch.bfloat16)


CASTS = {
    "to-bfloat16": (2, lambda: CastModel().to(torch.bfloat16)),
    "bfloat16": (2, lambda: CastModel().bfloat16()),
    "half": (2, lambda: CastModel().half()),
    "double": (8, lambda: CastModel().double()),
    "to-device": (4, lambda: CastModel().to("cpu")),
    "to-device-and-dtype": (2, lambda: CastModel().to(torch.device("cuda"), torch.bfloat16)),
    "there-and-back": (4, lambda: CastModel().half().float()),
    "apply": (4, lambda: CastModel().apply(initialized)),
    "default-dtype": (2, bf16_by_default),
    "state": (4, lambda: CastModel().requires_grad_(True).train()),
    "from-values": (2, of_values),
}


@pytest.mark.parametrize(
    "name", telling_first(CASTS, {"to-device-and-dtype", "default-dtype", "from-values", "double"})
)
def test_a_model_that_casts_itself(name):
    """What `model()` does after building is no matter, as modules cannot cast fake tensors."""
    itemsize, build = CASTS[name]
    source = ModelSource(
        path=Path("model.py"), build=build, batch=gpt_batch, loss=None, dependencies=()
    )
    graph = capture_source(source)
    assert sum(t.bytes_at(1) for t in graph.params) == itemsize * graph.num_params()
    plan = default_plan(graph, microbatch_size=2, num_microbatches=1)
    run = dry_run(plan, graph, build)
    # Weights, gradients and AdamW's two states.
    state = 4 * itemsize * graph.num_params()
    assert state <= run.rest_bytes < 1.1 * state


def test_a_llama_in_bf16():
    """The README's path for a GPU: an unmodified Llama that is cast as it is built."""
    pytest.importorskip("transformers")

    def build():
        return build_hf("LlamaForCausalLM", num_hidden_layers=1).to(torch.bfloat16)

    graph = capture_module(build(), text_batch(2), text_batch(3))
    plan = default_plan(graph, tp=2, microbatch_size=2, num_microbatches=1)
    assert dry_run(plan, graph, build).peak_bytes > 4 * graph.num_params()

"""Frozen parameters in price and memory: flop against autograd, bytes against the dry run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine.memory import LAYOUTS, make_plan
from costmodel import CostCache, estimate
from costmodel.time.communication import data_parallel_seconds
from costmodel.time.stage_costs.chain import Split, chain_costs
from planner.capture.source.model_file import ModelSource
from planner.language.graph import from_json, to_json
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.language.ops.flops import backward_work
from planner.language.ops.record import family_of
from planner.language.plan import Plan
from planner.language.plan.replication import Replication
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.proofs.verify import compare_with_one_process
from profiles import Group, load_profile
from search import SearchRequest, find_plan
from tests.builders import build_hf
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile
from tests.frozen import build_lora, frozen_models
from tests.spawn import run_ranks


def captured(name, precision="model"):
    tiny = frozen_models()[name]
    if tiny.needs_transformers:
        pytest.importorskip("peft")
    return capture_module(
        tiny.build(), tiny.batch(2), tiny.batch(3), name=name, precision=precision
    )


# ---------------------------------------------------------------------------------------
# flop


def backward_flop(graph, size, first=0):
    """Flop of the backward of blocks from a first on, of products by weights."""
    total = 0.0
    for block in graph.blocks[first:]:
        program = graph.classes[block.class_index].bind(size)
        total += sum(
            backward_work(op, program.tensor).flop
            for op in program.ops
            if family_of(op.target).weight_product is not None
        )
    return total


@pytest.mark.parametrize("name", ["gpt-second-half", "gpt-head", "gpt-norms", "gpt-biases"])
def test_products_of_a_backward_are_those_that_autograd_runs(name):
    """A product for each operand that a gradient reaches: no weight's that is frozen, no input's
    before the first trained parameter."""
    tiny, graph = frozen_models()[name], captured(name)
    module, batch = tiny.build(), tiny.batch(2)
    loss = loss_of(call_with_batch(module, batch), batch, tiny.loss)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)
    counts = counter.get_flop_counts()["Global"]
    assert backward_flop(graph, 2) == sum(counts.get(product, 0) for product in products)


def wide_llama(lora):
    """Two layers of Llama 2 70B on the meta device, whole or with adapters on attention."""
    pytest.importorskip("peft")
    sizes = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip

    def batch(size):
        ids = torch.zeros(size, 4096, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    with torch.device("meta"):
        build = build_lora if lora else build_hf
        model = build("LlamaForCausalLM", **sizes, **({"rank": 16} if lora else {}))
        model.to(torch.bfloat16)
        return capture_module(model, batch(2), batch(3), name=f"wide-{lora}")


@pytest.fixture(scope="module")
def wide():
    return wide_llama(lora=False), wide_llama(lora=True)


def test_lora_halves_the_backward(wide):
    """Of two products a weight, the input's gradient alone; adapters add less than 1%. In the first
    layer the products of q, k and v have no backward either."""
    full, lora = wide
    second = next(b.index for b in full.blocks if "layers.1" in b.name)
    ratio = backward_flop(lora, 1, second) / backward_flop(full, 1, second)
    assert 0.5 < ratio < 0.51
    assert backward_flop(lora, 1) / backward_flop(full, 1) < 0.49
    assert lora.num_params() / full.num_params() == pytest.approx(1, abs=0.01)


def test_lora_exchanges_and_updates_next_to_nothing(wide):
    """Under ZeRO 1 a replica of a base model reduces, gathers and steps adapters alone."""
    profile = load_profile("h100-sxm5-80gb")
    times, memory = [], []
    for graph in wide:
        plan = default_plan(graph, dp=4, num_microbatches=2, zero_stage=1)
        found = estimate(graph, profile, plan)
        times.append(found.path.parts)
        memory.append(found.memory[0])
    full, lora = times
    assert lora["optimizer_s"] < 0.1 * full["optimizer_s"]
    assert lora["dp_comm_s"] < 0.1 * full["dp_comm_s"]
    assert lora["compute_s"] < 0.8 * full["compute_s"]
    assert memory[1].optimizer_bytes < 0.02 * memory[0].optimizer_bytes


# ---------------------------------------------------------------------------------------
# exchange, recomputation


def test_zero_3_gathers_frozen_parameters_and_reduces_none():
    """For a forward all, for a backward those of blocks with one; ZeRO 1 leaves them alone."""
    profile, group = load_profile("h100-sxm5-80gb"), Group(ranks_per_node=4)
    asked = {"param_bytes": 1e6, "num_blocks": 4}

    def seconds(zero_stage, **frozen):
        replication = Replication(replicas=4, zero_stage=zero_stage)
        return data_parallel_seconds(profile, group, replication, **asked, **frozen)

    bare = seconds(3)
    frozen = seconds(3, frozen_bytes=1e9, frozen_backward_bytes=0.0)
    assert frozen.forward_s > 10 * bare.forward_s
    assert frozen.backward_s == bare.backward_s
    again = seconds(3, frozen_bytes=1e9, frozen_backward_bytes=1e9)
    scattered = bare.backward_s - bare.forward_s
    assert again.backward_s - scattered == pytest.approx(again.forward_s)


def test_blocks_before_the_first_trained_parameter_have_no_backward():
    """Neither seconds nor recomputation, and no tensor that is kept."""
    graph = captured("gpt-second-half")
    costs = CostCache(graph, load_profile("h100-sxm5-80gb"))
    chain = chain_costs(costs, Split(microbatch_size=2))
    times = chain.times
    has_backward = [any(graph.tensor[n].requires_grad for n in b.outputs) for b in graph.blocks]
    assert has_backward == sorted(has_backward)
    assert not has_backward[0]
    for choice in ("full", "selective", "none"):
        spent = times.backward_s + times.recompute_s(choice)
        assert [s > 0 for s in spent] == has_backward
    assert [kept > 0 for kept in chain.blocks.saved_bytes] == has_backward


# ---------------------------------------------------------------------------------------
# bytes


def errors(name, layouts):
    """How far the prediction is over the dry run, for each pp rank of each layout."""
    tiny, known, found = frozen_models()[name], {}, {}
    for label in layouts:
        layout = LAYOUTS[label]
        precision = layout.get("precision", "model")
        if precision not in known:
            known[precision] = CostCache(captured(name, precision), CpuProfile())
        costs = known[precision]
        plan = make_plan(costs.graph, **layout)
        memory = estimate(costs.graph, costs.profile, plan, costs=costs).memory
        for rank in range(0, plan.world_size, plan.world_size // plan.pp):
            run = dry_run(plan, costs.graph, tiny.build, rank=rank, on_gloo=True)
            found[label, rank] = float(memory[run.pp_rank].tensor_bytes) / run.peak_bytes - 1
    return found


def check(name, layouts):
    far = {at: f"{error:+.2%}" for at, error in errors(name, layouts).items() if abs(error) > 0.01}
    assert not far


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("gpt-second-half", ("selective", "dp2-zero3", "pp2-fthenb-full")),
        ("gpt-tied-norms", ("dp2-zero3",)),
        pytest.param("lora-llama", ("dp2-zero3-full",), marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_the_dry_run(name, layouts):
    check(name, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("name", frozen_models())
def test_bytes_of_every_layout(name):
    check(
        name,
        (
            "one", "full", "selective", "dp2", "tp2", "pp2", "pp2-zb_h1", "pp2-vpp2",
            "pp2-fthenb-full", "pp2-zb_h1-selective", "tp2-full", "dp2-zero1", "dp2-zero2",
            "dp2-zero3", "dp2-zero3-full", "dp2-pp2-zero2", "dp2-pp2-zero3", "dp2-tp2-zero3",
            "bf16", "bf16-pp2", "bf16-dp2-zero1", "bf16-dp2-zero3",
        ),
    )  # fmt: skip


def test_shards_on_the_host():
    """With the optimizer there, ZeRO 3 has the shards of frozen parameters there, too."""
    tiny, graph = frozen_models()["gpt-head"], captured("gpt-head")
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, dp=2, zero_stage=3, microbatch_size=4)
    plan = plan.model_copy(update={"optimizer_on_host": True})
    (parts,) = estimate(graph, costs.profile, plan, costs=costs).memory
    run = dry_run(plan, graph, tiny.build, on_gloo=True)
    assert float(parts.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.01)
    frozen = sum(t.bytes_at(1) for t in graph.params if not t.requires_grad)
    assert parts.host_bytes > frozen / 2


def test_frozen_tensors_that_blocks_share_count_once_in_a_bound():
    """The tied embedding of a rank with both of its users; a half each where they are apart."""
    graph = captured("gpt-tied-norms")
    costs = CostCache(graph, CpuProfile())
    loads = chain_costs(costs, Split(microbatch_size=2)).loads
    frozen = sum(t.bytes_at(1) for t in graph.params if not t.requires_grad)
    n = len(graph.blocks)
    whole = loads.loads(np.array(0), np.array(n))
    assert whole.frozen_param_bytes == frozen
    parts = [loads.loads(np.array(a), np.array(b)).frozen_param_bytes for a, b in ((0, 2), (2, n))]
    tied = next(t for t in graph.params if t.fqn == "token.weight").bytes_at(1)
    assert sum(parts) == frozen + tied


# ---------------------------------------------------------------------------------------
# search


def test_a_lora_model_fits_where_full_training_does_not(wide):
    """The base model rests in memory once: no gradients, moments or masters of it."""
    profile = load_profile("h100-sxm5-80gb")
    request = SearchRequest(num_devices=1, global_batch=2, memory_limit_bytes=15 * 10**9)
    full, lora = (find_plan(graph, profile, request) for graph in wide)
    assert full.plan is None or full.plan.optimizer_on_host
    assert lora.plan is not None
    assert not lora.plan.optimizer_on_host
    assert lora.certificate is not None
    assert lora.certificate.gap == 0


@pytest.mark.slow
def test_a_searched_plan_of_a_lora_model_verifies():
    """From capture to training."""
    graph = captured("lora-gpt2-dropout")
    request = SearchRequest(num_devices=2, global_batch=4)
    result = find_plan(graph, load_profile("h100-sxm5-80gb"), request)
    assert result.plan is not None
    assert run_ranks(verified, 2, to_json(graph), result.plan.model_dump_json())[0]


def verified(graph, plan):
    """On each rank: whether a plan of the LoRA model verifies."""
    tiny = frozen_models()["lora-gpt2-dropout"]
    source = ModelSource(
        path=Path("lora.py"), build=tiny.build, batch=tiny.batch, loss=None, dependencies=()
    )
    plan = Plan.model_validate_json(plan)
    report = compare_with_one_process(plan, source, steps=2, graph=from_json(graph))
    return report is None or report.passed

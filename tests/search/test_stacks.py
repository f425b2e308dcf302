"""X11, B5: a plan searched for a stack is written by its emitter, with nothing pinned nor
accepted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from costmodel.execution import execution_names, find_execution
from planner.emit import EMITTERS, PlanView, emit, find_emitter, refusals
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_rules import Run, broken_rules
from planner.emit.targets.megatron_bridge import overrides
from planner.emit.targets.megatron_lm import megatron_flags
from planner.errors import LayoutError, PlanError, PlannerError
from planner.language.graph import ModelGraph
from planner.language.layout.axes import axis_names
from planner.language.plan import Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.stacks import (
    STACKS,
    Stack,
    execution_of,
    expressed_of,
    register_stack,
    stack_of,
)
from planner.language.templates import Experts, Transformer, build_transformer
from profiles import Profile, load_profile
from search import SearchRequest, find_plan
from tests.emit.readers import (
    ACCELERATE_FIELDS,
    CURRENT,
    DEEPSPEED_FIELDS,
    NANOTRON_FIELDS,
    TRAINING,
    assert_documented,
    load_torchtitan,
    loaded_by_torch,
    read_by_accelerate,
)

QUICK, SLOW = 2, 8
"""Random models and clusters for each stack."""

SMALL = Transformer(
    layers=6, hidden=512, heads=8, kv_heads=2, ffn_hidden=1536, vocab=1024, seq_len=512
)


@cache
def h100() -> Profile:
    return load_profile("h100-sxm5-80gb")


@cache
def small(**sizes: Any) -> ModelGraph:
    return build_transformer(replace(SMALL, **sizes))


def random_graph(rng: random.Random) -> ModelGraph:
    """A small transformer: dense or of experts, by Hugging Face's code or by Megatron's."""
    heads = rng.choice([4, 8, 12])
    hidden = heads * rng.choice([32, 64])
    width = hidden * rng.choice([2, 3, 4])
    return build_transformer(
        Transformer(
            layers=rng.choice([2, 3, 5, 8, 13]),
            hidden=hidden,
            heads=heads,
            kv_heads=rng.choice([3, 12] if heads == 12 else [1, 2, 4, heads]),
            ffn_hidden=width,
            vocab=rng.choice([1000, 4096, 50257]),
            seq_len=rng.choice([256, 384, 1000]),
            tied=rng.random() < 0.3,
            experts=Experts(number=4, per_token=2, width=width) if rng.random() < 0.3 else None,
            code=rng.choice(["modules", "huggingface"]),
        )
    )


def random_request(rng: random.Random, stack: Stack, graph: ModelGraph, most: int) -> SearchRequest:
    """A question of at most so many devices, with a choice fixed in every other case: one that the
    stack has, as others are refused."""
    devices = rng.choice([count for count in (1, 2, 4, 8, 16) if count <= most])
    request = SearchRequest(
        num_devices=devices,
        global_batch=devices * rng.choice([1, 2, 6]),
        execution=rng.choice(stack.executions),
        precision="bf16",
    )
    expressed = expressed_of(request.execution, graph)
    assert expressed is not None
    name, size = rng.choice(["tp", "pp", "cp"]), rng.choice([2, 3, 4])
    is_fixed = devices % size == 0 and not expressed.why_not_size(name, size)
    return replace(request, **{name: size}) if is_fixed else request


def plans_of(rng: random.Random, stack: Stack, most: int) -> Iterator[tuple[ModelGraph, Plan]]:
    """Yield the plan of a random question, and that under a part of the memory which it took."""
    graph = random_graph(rng)
    request = random_request(rng, stack, graph, most)
    try:
        plan = find_plan(graph, h100(), request).plan
    except LayoutError:
        # The choice that was fixed goes with no batch, or no op of this code is divided so.
        request = replace(request, tp=None, pp=None, cp=None)
        plan = find_plan(graph, h100(), request).plan
    assert plan is not None
    yield graph, plan
    fullest = max(plan.estimate["memory"], key=lambda rank: rank["total_bytes"])
    own_bytes = fullest["total_bytes"] - fullest["context_bytes"]
    limit = int(fullest["context_bytes"] + rng.choice([0.3, 0.5, 0.7, 0.9]) * own_bytes)
    found = find_plan(graph, h100(), replace(request, memory_limit_bytes=limit))
    if found.plan is None and found.smallest_memory_bytes is not None:
        limit = int(1.02 * found.smallest_memory_bytes)
        found = find_plan(graph, h100(), replace(request, memory_limit_bytes=limit))
    assert found.plan is not None
    yield graph, found.plan


def read_megatron(view: PlanView, files: dict[str, str], folder: Path) -> None:
    """Hold flags to Megatron-LM's own rules; experts whose routing is not told are the user's."""
    flags = megatron_flags(view)
    text = " ".join(f"--{name} {value}" for name, value in flags.items())
    assert all(f"--{name}" in files.get("megatron-lm.sh", text) for name in flags)
    is_told = "num-experts" in flags
    experts = {"num-experts": 4, "moe-router-topk": 2} if view.has_experts and not is_told else {}
    run = Run(flags=parse_flags(text), num_devices=view.plan.world_size, model=experts)
    assert broken_rules(run) == []
    assert (run.dp, run.num_microbatches) == (view.plan.dp, view.plan.num_microbatches)
    assert max(1, run.vpp) == view.plan.vpp


def read_bridge(view: PlanView, files: dict[str, str], folder: Path) -> None:
    read_megatron(view, {}, folder)
    names = [text.partition("=")[0] for text in overrides(view)]
    assert len(set(names)) == len(names)


def read_torchtitan(view: PlanView, files: dict[str, str], folder: Path) -> None:
    """Run the configuration on its documented fields; PyTorch's loader reads the schedule."""
    plan = view.plan
    with pytest.MonkeyPatch.context() as patch:
        config = load_torchtitan(files, folder, patch)
    assert_documented({k: v for k, v in vars(config.parallelism).items() if v is not None}, CURRENT)
    assert_documented({k: v for k, v in vars(config.training).items() if v is not None}, TRAINING)
    told = config.parallelism
    shards = told.data_parallel_replicate_degree * told.data_parallel_shard_degree
    assert shards == plan.dp * plan.degrees["rp"]
    if plan.pp > 1:
        sizes = {"num_stages": len(plan.stages), "num_microbatches": plan.num_microbatches}
        runtime = loaded_by_torch(folder / "schedule.csv", pp=plan.pp, **sizes)
        rows = [list(map(str, row)) for row in schedule_of(plan).jobs]
        assert [list(map(str, runtime.pipeline_order[rank])) for rank in range(plan.pp)] == rows


def read_deepspeed(view: PlanView, files: dict[str, str], folder: Path) -> None:
    """Hold the JSON to its documented fields, and to DeepSpeed's parser where that is installed."""
    config = json.loads(files["deepspeed.json"])
    assert_documented(config, DEEPSPEED_FIELDS)
    samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == samples * view.plan.dp
    try:
        from deepspeed.runtime.zero.config import get_zero_config
    except ImportError:
        return
    assert get_zero_config(config).stage == view.plan.zero_stage


def read_nanotron(view: PlanView, files: dict[str, str], folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(files["nanotron.yaml"])
    assert_documented(config, NANOTRON_FIELDS)
    sizes = (config["parallelism"][name] for name in ("dp", "tp", "pp"))
    assert tuple(sizes) == (view.plan.dp, view.plan.tp, view.plan.pp)


def read_accelerate(view: PlanView, files: dict[str, str], folder: Path) -> None:
    """Hold the YAML to its documented fields, and to accelerate's parser where that is there."""
    yaml = pytest.importorskip("yaml")
    text = files["accelerate.yaml"]
    assert_documented(yaml.safe_load(text), ACCELERATE_FIELDS)
    path = folder / "accelerate.yaml"
    path.write_text(text)
    try:
        read, _ = read_by_accelerate(path)
    except ImportError:
        return
    assert read.num_processes == view.plan.world_size
    assert read.use_fsdp == (view.plan.zero_stage >= 2)


Reader = Callable[[PlanView, dict[str, str], Path], None]
READERS: dict[str, Reader] = {
    "megatron-lm": read_megatron,
    "megatron-bridge": read_bridge,
    "torchtitan": read_torchtitan,
    "deepspeed": read_deepspeed,
    "nanotron": read_nanotron,
    "accelerate": read_accelerate,
}


@pytest.mark.filterwarnings("ignore")  # of packages that are read with
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed < QUICK else [pytest.mark.slow]) for seed in range(SLOW)],
)
@pytest.mark.parametrize("name", sorted(STACKS))
def test_a_plan_searched_for_a_stack_is_written_for_it(name, seed, tmp_path):
    rng = random.Random(f"{name} {seed}")
    for graph, plan in plans_of(rng, STACKS[name], most=4 if seed < QUICK else 16):
        view, emitter = PlanView(plan=plan, graph=graph), find_emitter(name)
        assert plan.execution in STACKS[name].executions
        assert refusals(view, emitter) == ()
        READERS[name](view, dict(emit(view, emitter).files), tmp_path)


@pytest.mark.parametrize(
    ("execution", "kind"), [("megatron-core", "ring"), ("torchtitan", "gathered")]
)
def test_a_plan_cuts_sequences_as_its_execution_is_priced(execution, kind):
    """B10: keys and values that an execution passes on are not written as gathered, where the
    stack's configuration can say so.
    """
    request = SearchRequest(
        num_devices=4, global_batch=2, cp=4, execution=execution, precision="bf16"
    )
    plan = find_plan(small(), h100(), request).plan
    assert plan is not None
    view = PlanView(plan=plan, graph=small())
    assert view.cp_kind() == kind
    assert not refusals(view, find_emitter(stack_of(execution_of(execution)).name))


def test_every_stack_has_an_emitter_and_every_execution_is_priced():
    assert set(READERS) == set(STACKS) <= set(EMITTERS)
    for stack in STACKS.values():
        assert set(stack.executions) <= set(find_emitter(stack.name).executions)
        assert set(stack.executions) <= set(execution_names())
        axes = {*axis_names(), "ep", "etp", "pp", "vpp"}
        assert set(stack.degrees) <= axes
        beside = {feature for feature, _ in stack.zero_beside}
        assert beside <= stack.features
        for stages in (stages for _, stages in stack.zero_beside):
            assert set(stages) <= set(stack.zero_stages)


def test_names_of_systems_stand_for_their_runtimes():
    assert execution_of("megatron") == execution_of("megatron-lm") == "megatron-core"
    assert execution_of("titan") == "torchtitan"
    assert execution_of("deepspeed") == "deepspeed-zero3"
    assert execution_of("accelerate") == execution_of("fsdp") == "fsdp-flash"
    assert execution_of("ours-eager") == "ours-eager"
    assert SearchRequest(num_devices=1, global_batch=1, execution="titan").execution == "torchtitan"
    assert find_execution("megatron").name == "megatron-core"
    assert stack_of("ours-eager") is stack_of("megatron-deepspeed") is None
    with pytest.raises(PlannerError, match=r"did you mean 'megatron'\?.*or of systems: accelerate"):
        find_execution("megatrom")
    with pytest.raises(PlanError, match="has the name 'titan', which stack 'torchtitan'"):
        register_stack(replace(STACKS["nanotron"], name="other", aliases=("titan",), executions=()))


TWO_NODES = SearchRequest(num_devices=16, global_batch=32, precision="bf16", execution="torchtitan")

NOT_EXPRESSED = [
    ({"zero": 1}, "`zero` 1 was given, .*torchtitan: torchtitan has ZeRO 0, 2 and 3; change"),
    ({"recompute": "selective"}, "`recompute` selective .*torchtitan recomputes all layers alike"),
    ({"offload": "optimizer"}, "`offload` optimizer .*torchtitan has nothing on the host"),
    ({"offload": "both", "execution": "megatron"}, "Megatron-LM has nothing on the host but the o"),
    ({"meshes": "own"}, "`meshes` own .*torchtitan has one mesh for all stages"),
    ({"tp": 4}, "`tp` 4 .*tp=4 does not divide the 2 heads of keys and values"),
    ({"pp": 16}, "`pp` 16 .*torchtitan cuts between layers, into 8 stages at most"),
    ({"schedule": "zb_h1", "execution": "megatron"}, "`schedule` zb_h1 .*it has 1f1b, interleaved"),
    ({"schedule": "synthesised", "execution": "megatron"}, "`schedule` synthesised .*it has 1f1b"),
    ({"pp": 2, "execution": "accelerate"}, "`pp` 2 .*accelerate has none"),
    ({"tp": 2, "execution": "deepspeed"}, "DeepSpeed places tensors by rules of its own"),
    ({"rp": 2, "execution": "megatron"}, "`rp` 2 .*Megatron-LM has none"),
    ({"precision": "model", "execution": "megatron"}, "`precision` model .*float32 alone is kept"),
    ({"zero": 0, "recompute": "full", "execution": "fsdp"}, "beside ZeRO 2 and 3 alone"),
    ({"num_devices": 12}, "`num_devices` 12 .*nodes have 8.*use 8 or 16"),
    ({"pp": 2, "balance": (2, 6), "execution": "nanotron"}, "`balance` 2,6 .*nanotron cuts before"),
]


@pytest.mark.parametrize(("changes", "match"), NOT_EXPRESSED, ids=lambda value: str(value)[:40])
def test_a_choice_that_a_stack_has_not_is_refused_by_name(changes, match):
    with pytest.raises(LayoutError, match=match):
        find_plan(small(), h100(), replace(TWO_NODES, **changes))


def test_a_pin_that_a_stack_places_otherwise_is_refused():
    name = "output_layer.weight"
    index, program = next(
        (index, program)
        for index, program in enumerate(small().classes)
        if any(program.tensor[own].fqn == name for own in program.params)
    )
    own = next(own for own in program.params if program.tensor[own].fqn == name)
    pinned = replace(TWO_NODES, pins=((index, own, "S(1)"),))
    with pytest.raises(LayoutError, match=r"output_layer.weight: S\(1\)@tp .*torchtitan has S\(0"):
        find_plan(small(), h100(), pinned)
    assert find_plan(small(), h100(), replace(pinned, execution="ours-eager")).plan is not None


def test_a_model_of_no_layers_is_priced_and_what_can_not_be_written_is_told():
    graph = small()
    blocks = tuple(replace(block, name=f"part {block.index}") for block in graph.blocks)
    found = find_plan(replace(graph, blocks=blocks), h100(), TWO_NODES)
    assert found.plan is not None
    assert "plans for torchtitan are priced, and can't be written for it: " in found.not_written
    assert "no chain of numbered layers" in found.not_written
    assert find_plan(graph, h100(), TWO_NODES).not_written == ""


@pytest.mark.parametrize(
    ("execution", "solver", "pp", "vpp"),
    [
        ("megatron", "dp", 4, 1),
        ("megatron", "dp", 2, 2),
        ("titan", "recursive", 4, 1),
        pytest.param("titan", "ilp", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_stages_are_cut_between_layers_of_several_blocks(execution, solver, pp, vpp):
    """Two blocks to a layer: no plan for a stack begins a stage with the second."""
    graph = small(layers=8)
    names = [f"layers.{(block.index - 1) // 2}.{block.index}" for block in graph.blocks]
    blocks = tuple(
        replace(block, name=name) if 0 < block.index < len(names) - 1 else block
        for block, name in zip(graph.blocks, names, strict=True)
    )
    halves = replace(graph, blocks=blocks)
    request = replace(TWO_NODES, num_devices=8, pp=pp, vpp=vpp, execution=execution, solver=solver)
    found = find_plan(halves, h100(), request)
    assert found.plan is not None
    assert {stage.first_block for stage in found.plan.stages} <= {0, 1, 3, 5, 7, 9}
    view = PlanView(plan=found.plan, graph=halves)
    assert refusals(view, find_emitter(execution)) == ()


def test_nothing_is_left_out_of_a_search_for_our_own_runtime():
    assert expressed_of("ours-eager", small()) is None
    found = find_plan(small(), h100(), replace(TWO_NODES, execution="ours-eager", zero=1))
    assert found.plan is not None
    assert found.not_written == ""


def test_experts_that_deepspeed_finds_are_searched_and_written():
    """X11, B5: by names; those of other code stay on all ranks, and ep asked for is refused."""
    of = {"experts": Experts(number=8, per_token=2, width=1024)}
    request = SearchRequest(
        num_devices=8, global_batch=16, execution="deepspeed-zero3", precision="bf16", ep=4
    )
    graph = small(**of, code="huggingface")
    plan = find_plan(graph, h100(), request).plan
    assert plan is not None
    assert plan.degrees["ep"] == 4
    emitted = emit(PlanView(plan=plan, graph=graph), find_emitter("deepspeed"))
    config = json.loads(emitted.files["deepspeed.json"])
    assert config["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    with pytest.raises(LayoutError, match=r"finds experts by names, and decoder\.layers\.0\.mlp"):
        find_plan(small(**of, code="modules"), h100(), request)

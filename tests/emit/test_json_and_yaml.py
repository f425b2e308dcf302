"""V12, X11: DeepSpeed's JSON, nanotron's and accelerate's YAML, Megatron-Bridge's overrides.

Where a system's package is installed its own parser reads the files; else the types and choices of
its documented fields hold them.
"""

import json
import re
from dataclasses import replace

import pytest

from planner.emit import PlanView, emit, find_emitter, refusals
from planner.emit.targets.accelerate import ACCELERATE
from planner.emit.targets.deepspeed import DEEPSPEED
from planner.emit.targets.megatron_bridge import MEGATRON_BRIDGE, overrides
from planner.language.lowering.defaults import default_plan
from planner.language.stacks.layered import LayeredModel
from planner.language.templates import Experts, Transformer, build_transformer
from tests.emit.readers import (
    ACCELERATE_FIELDS,
    DEEPSPEED_FIELDS,
    NANOTRON_FIELDS,
    assert_documented,
    read_by_accelerate,
)
from tests.emit.views import assert_golden, attending, changed, view_of

FLAT = {"tp": 1, "pp": 1, "vpp": 1, "dp": 8, "gpus": 8}
SPLIT = FLAT | {"cp": 2, "gpus": 16, "zero_stage": 3, "recompute": "full"}
NANOTRON = {"stack": "nanotron", "vpp": 1, "pp": 2, "gpus": 8, "zero_stage": 1}

GOLDEN = [
    ("deepspeed", FLAT | {"zero_stage": 3}),
    ("nanotron", NANOTRON),
    ("accelerate", SPLIT),
    ("megatron-bridge", {}),
]


@pytest.mark.parametrize(("name", "cells"), GOLDEN, ids=[name for name, _ in GOLDEN])
def test_golden_files(name, cells):
    assert_golden(emit(view_of(**cells), find_emitter(name)).files, name)


def named(view, name: str) -> set[str]:
    return {refusal.feature for refusal in refusals(view, find_emitter(name))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_has_documented_fields(stage):
    view = view_of(**FLAT, zero_stage=stage)
    if stage:
        view = changed(view, optimizer_on_host=True)
    config = json.loads(emit(view, find_emitter("deepspeed")).files["deepspeed.json"])
    assert_documented(config, DEEPSPEED_FIELDS)
    samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == samples * view.plan.dp == view.plan.global_batch


def test_deepspeed_reads_its_zero_section():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    view = changed(view_of(**FLAT, zero_stage=2), optimizer_on_host=True)
    config = json.loads(emit(view, find_emitter("deepspeed")).files["deepspeed.json"])
    read = zero.get_zero_config(config)
    assert (read.stage, read.offload_optimizer.device) == (2, "cpu")


def test_deepspeed_refuses_by_name():
    assert named(view_of(), "deepspeed") == {"pp", "vpp", "cuts", "schedule", "layouts"}
    over_tp = FLAT | {"tp": 2, "gpus": 16}
    assert named(view_of(**over_tp, zero_stage=3), "deepspeed") == {"tp", "layouts"}
    accepted = view_of(**over_tp, accepted=("layouts",))
    files = emit(accepted, find_emitter("deepspeed")).files
    assert json.loads(files["deepspeed.json"])["tensor_parallel"] == {"autotp_size": 2}
    whole = changed(view_of(**FLAT, zero_stage=0), optimizer_on_host=True)
    assert named(whole, "deepspeed") == {"optimizer-on-host"}


def of_experts(accepted: tuple[str, ...] = (), **choices: int) -> PlanView:
    """A plan of a small Mixtral, by Hugging Face's code."""
    graph = build_transformer(
        Transformer(
            layers=2, hidden=128, heads=4, kv_heads=4, ffn_hidden=256, vocab=1000, seq_len=256,
            experts=Experts(number=8, per_token=2, width=256), code="huggingface",
        )
    )  # fmt: skip
    plan = default_plan(graph, zero_stage=2, **choices).model_copy(update={"precision": "bf16"})
    return PlanView(plan=plan, graph=graph, accepted=accepted)


def test_deepspeed_lays_experts_out():
    """X11, N16: on groups of ranks that follow each other, read by its own parser where it is."""
    view = of_experts(dp=8, ep=4)
    emitted = emit(view, find_emitter("deepspeed"))
    config = json.loads(emitted.files["deepspeed.json"])
    assert_documented(config, DEEPSPEED_FIELDS)
    assert config["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    (note,) = (note for note in emitted.notes if "AutoEP" in note)
    assert "preset of the model's config.model_type (mixtral, qwen2_moe," in note
    (without,) = emit(of_experts(dp=8), find_emitter("deepspeed")).files.values()
    assert "expert_parallel" not in without
    own = pytest.importorskip("deepspeed.module_inject.auto_ep_config")
    folding = pytest.importorskip("deepspeed.module_inject.auto_ep_folding")
    read = own.parse_autoep_config(config["expert_parallel"])
    own.validate_autoep_config(read, world_size=8, pp_size=1, tp_size=1, sp_size=1, zero_stage=2)
    sizes = {"world_size": 8, "pp_size": 1, "tp_size": 1, "ep_size": read.autoep_size}
    tables = folding.expected_folding_group_tables(folding.build_folding_spec(**sizes))
    assert set(tables.ep_groups) == set(view.plan.mesh(0).folded.groups("ep"))


def renamed(view: PlanView, old: str, new: str) -> PlanView:
    """A view of the model with other names of parameters."""
    assert view.graph is not None
    tensors = tuple(replace(m, fqn=m.fqn.replace(old, new)) for m in view.graph.tensors)
    return replace(view, graph=replace(view.graph, tensors=tensors))


def test_deepspeed_refuses_experts_that_it_does_not_find():
    view = of_experts(dp=8, ep=4)
    (refused,) = refusals(renamed(view, "mlp.experts", "moe.experts"), find_emitter("deepspeed"))
    assert refused.feature == "ep"
    assert refused.why.startswith("DeepSpeed finds experts by names, and model.layers.0.moe.exp")
    (refused,) = refusals(renamed(view, "mlp.gate.", "mlp.router."), find_emitter("deepspeed"))
    assert refused.why.endswith("there is no model.layers.0.mlp.gate.weight")
    beside_tp = changed(of_experts(("layouts",), dp=4, tp=2, ep=4), optimizer_on_host=True)
    whys = {refusal.why for refusal in refusals(beside_tp, find_emitter("deepspeed"))}
    assert "AutoEP beside AutoTP has no optimizer on the host" in whys


@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "cp": 2, "gpus": 16}, {"sp": 0}])
def test_nanotron_has_documented_fields(changes):
    yaml = pytest.importorskip("yaml")
    view = view_of(**NANOTRON | changes)
    config = yaml.safe_load(emit(view, find_emitter("nanotron")).files["nanotron.yaml"])
    assert_documented(config, NANOTRON_FIELDS)
    assert config["parallelism"]["tp_mode"] == ("ALL_REDUCE" if changes.get("sp") == 0 else
                                                "REDUCE_SCATTER")  # fmt: skip


def test_nanotron_cuts_stages_itself():
    view = view_of(**NANOTRON)
    # Layers cost 4 * 32 * 128 * 4096 + 3 * 14336 * 4096, and the head 128256 * 4096 (padded: that
    # is 2.17 layers). Half of 34.2 layers is more than 17: the 18th takes rank 0 over it.
    assert LayeredModel(graph=view.graph).places_by_products(2) == (0,) * 18 + (1,) * 15
    assert "cuts" not in named(view, "nanotron")
    even = view_of(**NANOTRON | {"stack": "megatron-core"})
    found = refusals(even, find_emitter("nanotron"))
    assert [refusal.feature for refusal in found] == ["cuts"]
    assert "nanotron cuts stages of 18,14 layers" in found[0].why


def test_nanotron_refuses_by_name():
    found = named(view_of(zero_stage=2, recompute="selective"), "nanotron")
    assert found == {"vpp", "cuts", "zero", "recompute"}
    zero_bubble = named(view_of(**NANOTRON | {"schedule": "ZB-1p"}), "nanotron")
    assert zero_bubble == {"schedule"}


@pytest.mark.parametrize("zero", [0, 2])
def test_deepspeed_scales_the_loss_of_fp16(zero):
    """It takes no fp32 sums of fp16 gradients without ZeRO, and says so."""
    view = changed(view_of(**FLAT | {"zero_stage": zero}), precision="fp16")
    emitted = emit(view, find_emitter("deepspeed"))
    config = json.loads(emitted.files["deepspeed.json"])
    assert_documented(config, DEEPSPEED_FIELDS)
    assert config["fp16"] == {"enabled": True}
    assert "bf16" not in config
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if zero else None)
    assert any("gradients of fp16 in fp16" in note for note in emitted.notes) == (zero == 0)


def test_who_has_no_fp16_refuses_it_by_name():
    view = changed(view_of(**FLAT | {"zero_stage": 0}), precision="fp16")
    for name in ("torchtitan", "nanotron", "megatron-bridge"):
        (why,) = (r.why for r in refusals(view, find_emitter(name)) if r.feature == "precision")
        assert " has fp32 master weights beside bf16" in why, name
        assert "fp16" not in why
    for name in ("megatron-lm", "accelerate"):
        assert "precision" not in named(view, name)
    text = emit(view, find_emitter("accelerate")).files["accelerate.yaml"]
    assert "mixed_precision: fp16" in text


@pytest.mark.parametrize("cells", [SPLIT, FLAT | {"zero_stage": 0}, FLAT | {"zero_stage": 2}])
def test_accelerate_has_documented_fields(cells, tmp_path):
    yaml = pytest.importorskip("yaml")
    view = view_of(**cells)
    text = emit(view, find_emitter("accelerate")).files["accelerate.yaml"]
    assert_documented(yaml.safe_load(text), ACCELERATE_FIELDS)


def test_accelerate_launch_takes_its_file(tmp_path):
    pytest.importorskip("accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit(view_of(**SPLIT), find_emitter("accelerate")).files[path.name])
    read, mixed_precision_from_file = read_by_accelerate(path)
    assert mixed_precision_from_file
    assert (read.use_fsdp, read.use_parallelism_config) == (True, True)
    assert (read.num_processes, read.num_machines, read.mixed_precision) == (16, 2, "bf16")
    assert (read.parallelism_config_dp_shard_size, read.parallelism_config_cp_size) == (8, 2)
    assert str(read.fsdp_activation_checkpointing).lower() == "true"
    assert str(read.fsdp_reshard_after_forward).lower() == "true"


def test_accelerate_refuses_by_name():
    assert named(view_of(), "accelerate") == {"pp", "vpp", "cuts", "schedule", "zero", "layouts"}
    assert named(view_of(zero_stage=0), "accelerate") == {
        "tp", "pp", "vpp", "cuts", "schedule", "layouts",
    }  # fmt: skip


def test_megatron_bridge_sets_what_a_recipe_may_have_otherwise():
    bridge = find_emitter("megatron-bridge")
    plain = view_of(**FLAT | {"dp": 4, "gpus": 4, "zero_stage": 0})
    text = emit(plain, bridge).files["megatron-bridge.sh"]
    found = dict(re.findall(r'"([a-z._]+)=(.*)"\n', text))
    assert found["model.sequence_parallel"] == "false"
    assert found["model.virtual_pipeline_model_parallel_size"] == "null"
    assert found["model.recompute_granularity"] == "null"
    assert found["ddp.use_distributed_optimizer"] == "false"
    assert found["optimizer.use_distributed_optimizer"] == "false"
    full = emit(view_of(recompute="full", zero_stage=1), bridge).files["megatron-bridge.sh"]
    again = dict(re.findall(r'"([a-z._]+)=(.*)"\n', full))
    assert again["model.recompute_granularity"] == "full"
    assert again["optimizer.use_distributed_optimizer"] == "true"
    assert set(found) >= set(again) - {"model.pipeline_model_parallel_layout"}


def in_fp32(view):
    """The same plan, of a model in fp32 that keeps its dtypes."""
    tensors = tuple(replace(t, dtype="float32") for t in view.graph.tensors)
    return replace(changed(view, precision="model"), graph=replace(view.graph, tensors=tensors))


def test_megatron_bridge_refuses_fp32_which_its_recipes_would_train_in_bf16():
    plain = in_fp32(view_of(**FLAT | {"zero_stage": 0}))
    (refused,) = refusals(plain, MEGATRON_BRIDGE)
    assert refused.feature == "precision"
    assert refused.why == (
        "the model is float32, and of the dtypes of models none is kept in Megatron-Bridge; others "
        "train in 16 bits with fp32 master weights (`precision` bf16)"
    )
    assert not refusals(plain, find_emitter("megatron-lm"))


def test_megatron_bridge_undoes_what_recipes_have_beside_a_plan():
    """Recipes of experts have whole experts on each rank of tp, some cut stages on their own, and
    either of two switches turns Megatron-FSDP on."""
    found = dict(text.split("=", 1) for text in overrides(view_of(model="mixtral-8x7b")))
    assert found["model.expert_tensor_parallel_size"] == "2"
    assert found["model.num_layers_in_first_pipeline_stage"] == "null"
    assert found["model.account_for_loss_in_pipeline_split"] == "false"
    assert found["optimizer.use_precision_aware_optimizer"] == "false"
    assert found["dist.use_megatron_fsdp"] == found["ddp.use_megatron_fsdp"] == "false"
    own = dict(text.split("=", 1) for text in overrides(view_of(model="mixtral-8x7b", ep=2, etp=1)))
    assert own["model.expert_model_parallel_size"] == "2"
    assert own["model.expert_tensor_parallel_size"] == "1"
    sharded = view_of(**FLAT | {"zero_stage": 3})
    fsdp = dict(text.split("=", 1) for text in overrides(sharded))
    assert fsdp["dist.use_megatron_fsdp"] == fsdp["ddp.use_megatron_fsdp"] == "true"
    assert fsdp["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"


def test_deepspeed_counts_samples_over_replicas_alone():
    """8 ranks of tp=2 are 4 replicas: 64 samples a step are 16 microbatches of 1."""
    view = view_of(**FLAT | {"tp": 2, "dp": 4}, zero_stage=1, accepted=("layouts",))
    config = json.loads(emit(view, DEEPSPEED).files["deepspeed.json"])
    assert config == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"autotp_size": 2},
    }


def test_deepspeed_trains_fp32_without_a_section_of_bf16():
    config = json.loads(emit(in_fp32(view_of(**FLAT)), DEEPSPEED).files["deepspeed.json"])
    assert not {"bf16", "data_types"} & set(config)


def accelerated(view) -> dict[str, str]:
    """Fields of the YAML file, sections left out."""
    lines = emit(view, ACCELERATE).files["accelerate.yaml"].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if ": " in line and line[0] != "#")


@pytest.mark.parametrize(("stage", "frees"), [(2, "false"), (3, "true")])
def test_accelerate_frees_gathered_weights_with_zero_3_alone(stage, frees):
    found = accelerated(view_of(**FLAT, zero_stage=stage))
    assert found["distributed_type"] == "FSDP"
    assert found["fsdp_reshard_after_forward"] == frees
    assert found["fsdp_activation_checkpointing"] == "false"
    assert (found["num_processes"], found["num_machines"]) == ("8", "1")


def test_accelerate_passes_keys_and_values_of_a_ring_on():
    """B10."""
    view = view_of(**SPLIT)
    for given, sent in ((view, "allgather"), (attending(view, "S(2),S(2),S(2)"), "alltoall")):
        assert accelerated(given)["parallelism_config_cp_comm_strategy"] == sent


def test_accelerate_has_no_fsdp_without_zero():
    found = accelerated(in_fp32(view_of(**FLAT, zero_stage=0)))
    assert (found["distributed_type"], found["mixed_precision"]) == ("MULTI_GPU", "'no'")
    assert not any(name.startswith("fsdp") for name in found)
    assert named(view_of(**FLAT, zero_stage=1), "accelerate") == {"zero"}
    assert named(view_of(**FLAT, zero_stage=0, recompute="full"), "accelerate") == {"recompute"}

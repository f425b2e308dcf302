"""V12, X11: Megatron-LM's flags. Its own parser took these files when they were made."""

import re
from dataclasses import replace

import pytest

from planner.emit import emit, find_emitter, refusals
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_refusals import layers_with_experts
from planner.emit.megatron_rules import Run, broken_rules
from planner.emit.targets.megatron_bridge import overrides
from planner.emit.targets.megatron_lm import megatron_flags, pipeline_layout
from planner.emit.view import PlanView
from planner.language.layout.class_layout import ClassLayout
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.routed_experts import router_weights, routings
from planner.language.plan import ClassRecompute, recompute_fields
from tests.captures import capture_module
from tests.emit.views import assert_golden, attending, changed, view_of
from tests.model_matrix import model_matrix

MEGATRON = find_emitter("megatron-lm")


def test_golden_script():
    assert_golden(emit(view_of(), MEGATRON).files, "megatron-lm")


def test_what_is_left_to_the_user_names_latent_attention_where_a_model_has_it():
    latent = view_of(model="Moonlight", key_rank=512, rope_dim=64, tp=1, pp=1, vpp=1, gpus=2)
    for view, is_named in ((view_of(), False), (latent, True)):
        notes = " ".join(emit(view, MEGATRON).notes)
        assert ("--multi-latent-attention" in notes) == is_named


def unrolled(layout: str) -> list[str]:
    """Expand a layout as Megatron-LM's parse_str_to_list does: brackets, then letters."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    return layout.split("|")


@pytest.mark.parametrize(
    "cells",
    [{}, {"layers": 30, "vpp": 1}, {"layers": 40, "pp": 2, "vpp": 4, "gpus": 8}, {"layers": 11}],
    ids=str,
)
def test_layout_puts_every_layer_where_the_plan_does(cells):
    view = view_of(**cells)
    stages = unrolled(pipeline_layout(view.parts))
    assert len(stages) == len(view.plan.stages)
    assert (stages[0][0], stages[-1][-1]) == ("E", "L")
    for stage, text in zip(view.plan.stages, stages, strict=True):
        blocks = [view.graph.blocks[b].name for b in stage.blocks]
        assert text.count("t") == sum(".layers." in name for name in blocks)


def test_uneven_stages_survive():
    view = view_of(vpp=1)
    bounds = (0, 3, 15, 28, 34)
    stages = tuple(
        stage.model_copy(update={"first_block": bounds[s], "last_block": bounds[s + 1] - 1})
        for s, stage in enumerate(view.plan.stages)
    )
    flags = megatron_flags(changed(view, stages=stages))
    assert flags["pipeline-model-parallel-layout"] == "Et*2|t*12|t*13|t*5L"


def first_in_full(view, layers, rest="none", last=False):
    """The view with so many layers of each stage, first or last, recomputed in full."""
    stages = []
    for stage in view.plan.stages:
        own = [b for b in stage.blocks if view.layer_of_block[b] is not None]
        chosen = own[-layers:] if last else own[:layers]
        by_block = ["full" if b in chosen else rest for b in stage.blocks]
        fields = recompute_fields(by_block, first_block=stage.first_block)
        stages.append(stage.model_copy(update=fields))
    return changed(view, stages=tuple(stages))


def test_the_first_layers_of_each_stage_are_recomputed_by_block():
    """--recompute-method block: of each (virtual) stage the first so many, no more of the others.
    A stage of fewer layers recomputes them all."""
    view = view_of(layers=30, recompute="none")
    for layers in (1, 2):
        given = first_in_full(view, layers)
        assert not refusals(given, MEGATRON)
        flags = megatron_flags(given)
        assert flags["recompute-granularity"] == "full"
        assert flags["recompute-method"] == "block"
        assert flags["recompute-num-layers"] == str(layers)
        assert "model.recompute_method=block" in overrides(given)
        assert "model.recompute_num_layers=" + str(layers) in overrides(given)


@pytest.mark.parametrize("options", [{"rest": "selective"}, {"last": True}], ids=str)
def test_other_layers_recomputed_apart_are_refused(options):
    given = first_in_full(view_of(layers=30, recompute="none"), 2, **options)
    ((feature, why),) = [(r.feature, r.why) for r in refusals(given, MEGATRON)]
    assert feature == "recompute"
    assert why.startswith("Megatron-LM recomputes in full the first layers of each stage")


RING = "S(2),S(2),S(2)"


def test_a_ring_is_sent_from_rank_to_rank():
    """B10: where a stack has no ring the plan is refused."""
    view = attending(view_of(cp=2, gpus=32), RING)
    assert not refusals(view, MEGATRON)
    assert megatron_flags(view)["cp-comm-type"] == "p2p"
    (why,) = [r.why for r in refusals(view, find_emitter("nanotron")) if r.feature == "cp"]
    assert why == "on cp attention of nanotron gathers keys and values, and the plan's does not"


def test_zero_experts_context_and_recomputation_have_flags():
    flags = megatron_flags(view_of(zero_stage=3, recompute="full", cp=2, gpus=32))
    assert flags["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert flags["recompute-granularity"] == "full"
    assert (flags["context-parallel-size"], flags["cp-comm-type"]) == ("2", "all_gather")
    experts = view_of(model="mixtral-8x7b", ep=2, tp=2, etp=1)
    assert megatron_flags(experts)["expert-model-parallel-size"] == "2"
    assert megatron_flags(experts)["moe-token-dispatcher-type"] == "alltoall"
    for view in (view_of(), experts):
        assert not refusals(view, MEGATRON)
        words = [f"--{name} {value}" for name, value in megatron_flags(view).items()]
        parsed = parse_flags(" ".join(words))
        assert not parsed.broken
        assert set(parsed.values) == set(megatron_flags(view))


@pytest.mark.parametrize("name", ["hf-mixtral", "hf-deepseek-v3"])
def test_experts_whose_routing_is_told_are_read_back(name):
    """Numbers, widths, which layers and over which ranks, as Megatron-LM's rules read the flags."""
    model = model_matrix()[name]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    plan = default_plan(graph, dp=2, ep=2, num_microbatches=2, microbatch_size=1)
    view = PlanView(graph=graph, plan=plan)
    flags = megatron_flags(view)
    parsed = parse_flags(" ".join(f"--{each} {value}" for each, value in flags.items()))
    run = Run(flags=parsed, num_devices=plan.world_size, model={})
    assert broken_rules(run) == []
    told = routings(next(program for program in graph.classes if routings(program)))[0]
    assert (run.number("num-experts"), run.number("moe-router-topk")) == told
    assert (run.ep, run.etp, run.dp) == (2, 1, 2)
    has_some = [bool(routings(graph.classes[block.class_index])) for block in graph.blocks]
    freq = run.word("moe-layer-freq") if run.has("moe-layer-freq") else "1"
    layers = layers_with_experts(freq, view.num_layers)
    assert layers.count(True) == sum(has_some)
    # By the config: a Mixtral's experts are as wide as its feed-forward, a DeepSeek's narrower.
    config = model.build().config
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert run.number("moe-ffn-hidden-size") == width
    shared = getattr(config, "n_shared_experts", 0) * width
    assert run.number("moe-shared-expert-intermediate-size") == shared


def refused(view) -> dict[str, str]:
    return {refusal.feature: str(refusal) for refusal in refusals(view, MEGATRON)}


def test_what_it_can_not_express_is_refused_by_name():
    assert "has the job table of 1f1b" in refused(view_of(vpp=1, schedule="ZB-1p"))["schedule"]
    view = view_of(vpp=1)
    on_host = tuple(s.model_copy(update={"activations_on_host": True}) for s in view.plan.stages)
    found = refused(changed(view, stages=on_host, precision="model"))
    assert found.keys() == {"activations-on-host", "precision"}
    assert "the dtypes of models float32 alone is kept in Megatron-LM" in found["precision"]


def test_recomputation_of_single_ops_is_refused_or_accepted():
    view = view_of(vpp=1, recompute="selective")
    only = ClassRecompute(class_index=1, ops=(view.graph.classes[1].ops[0].name,))
    other = changed(view, recomputed=(only,))
    assert "`accept` recompute has selective" in refused(other)["recompute"]
    accepted = view_of(vpp=1, recompute="selective", accepted=("recompute",))
    emitted = emit(changed(accepted, recomputed=(only,)), MEGATRON)
    assert "--recompute-modules core_attn" in emitted.files["megatron-lm.sh"]
    assert emitted.notes[0].startswith("recompute differs from the plan, as accepted")


def test_experts_on_tp_need_sequence_parallelism():
    view = view_of(model="mixtral-8x7b", ep=2, sp=0)
    assert "trains experts on tp with sequence parallelism alone" in refused(view)["layouts"]
    assert "sequence-parallel" not in megatron_flags(view)
    accepted = view_of(model="mixtral-8x7b", ep=2, sp=0, accepted=("layouts",))
    assert megatron_flags(accepted)["sequence-parallel"] == ""


def test_placements_unlike_megatrons_are_refused():
    view = view_of()
    assert not view.differs_from_usual_tp()
    embedding = view.plan.layouts[0]
    by_width = ClassLayout.model_validate(embedding.model_dump() | {"params": ("S(1)",)})
    other = changed(view, layouts=(by_width, *view.plan.layouts[1:]))
    assert (
        "lies as S(1) where it has S(0), which a search takes with `pins`"
        in refused(other)["layouts"]
    )


def test_only_the_router_of_experts_may_be_whole_on_tp():
    """Attention of a layer with experts is split as that of others: whole, each rank of tp would
    hold twice the weights that Megatron-LM gives it."""
    view = view_of(model="mixtral-8x7b", ep=2, tp=2, etp=1)
    (layer,) = view.layer_classes
    program = view.graph.classes[layer]
    names = [program.tensor[name].fqn for name in program.params]
    assert [program.tensor[name].fqn for name in router_weights(program)] == ["mlp.router.weight"]

    def refused_where(fqn: str) -> str:
        layouts = [
            ClassLayout.model_validate(
                layout.model_dump()
                | {"params": tuple(
                    "R" if name == fqn else place
                    for name, place in zip(names, layout.params, strict=True)
                )}
            )
            if (layout.axis, layout.class_index) == ("tp", layer)
            else layout
            for layout in view.plan.layouts
        ]  # fmt: skip
        return changed(view, layouts=tuple(layouts)).differs_from_usual_tp()

    assert refused_where("mlp.router.weight") == ""
    assert "qkv.weight lies as R where it has S(0)" in refused_where("self_attention.qkv.weight")


def test_sums_of_fp16_are_in_fp32():
    flags = megatron_flags(changed(view_of(), precision="fp16"))
    assert {"fp16", "accumulate-allreduce-grads-in-fp32"} <= set(flags)
    assert "bf16" not in flags


def test_an_optimizer_on_the_host_is_a_distributed_one():
    """Megatron-LM raises for --use-precision-aware-optimizer without the distributed optimizer."""
    assert (
        "Megatron-LM has this beside ZeRO 1 alone"
        in (refused(changed(view_of(zero_stage=0), optimizer_on_host=True))["optimizer-on-host"])
    )
    on_host = changed(view_of(zero_stage=1), optimizer_on_host=True)
    assert not refused(on_host)
    flags = megatron_flags(on_host)
    assert {"use-precision-aware-optimizer", "use-distributed-optimizer"} <= set(flags)


@pytest.mark.parametrize(("etp", "flag"), [(1, "1"), (2, None)])
def test_experts_that_tp_does_not_cut_are_whole(etp, flag):
    """Where nothing is said, Megatron-LM cuts experts on as many ranks as all else."""
    view = view_of(model="mixtral-8x7b", ep=1, tp=2, etp=etp)
    assert view.experts_on_tp == ("whole" if etp == 1 else "cut")
    assert not refused(view)
    assert megatron_flags(view).get("expert-tensor-parallel-size") == flag
    sizes = dict(text.split("=", 1) for text in overrides(view))
    assert sizes["model.expert_tensor_parallel_size"] == str(etp)


def test_experts_dealt_or_cut_in_part_are_refused():
    view = view_of(model="mixtral-8x7b", ep=1, tp=2)
    (layer,) = view.layer_classes
    for places in (("S(0)", "S(0)"), ("R", "S(1)")):
        layouts = [
            ClassLayout.model_validate(
                layout.model_dump() | {"params": (*layout.params[:-2], *places)}
            )
            if (layout.axis, layout.class_index) == ("tp", layer)
            else layout
            for layout in view.plan.layouts
        ]
        assert (
            "of all experts on tp, or of none"
            in (refused(changed(view, layouts=tuple(layouts)))["layouts"])
        )
    assert view_of().experts_on_tp == "none"


@pytest.mark.parametrize(
    ("dispatcher", "written"),
    [
        ("allgather", ["--moe-token-dispatcher-type allgather"]),
        ("deepep", ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"]),
        (
            "hybridep",
            ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"],
        ),
    ],
)
def test_the_dispatcher_that_a_plan_was_priced_with_is_written(dispatcher, written):
    view = view_of(model="mixtral-8x7b", ep=2, tp=2, etp=1)
    told = {"experts": {"dispatchers": [dispatcher]}}
    plan = view.plan.model_copy(update={"estimate": told})
    flags = megatron_flags(replace(view, plan=plan))
    assert set(written) <= {f"--{name} {value}" for name, value in flags.items()}

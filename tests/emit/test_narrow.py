"""N10, X11: plans in 8-bit floats as other systems write them, read back, and what they refuse."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from commands.doors.megatron import _precision
from commands.doors.opened import Asked
from commands.doors.torchtitan import read, run_of
from planner.capture.narrow import with_narrow_products
from planner.emit import PlanView, emit, find_emitter, refusals
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_rules import Run, broken_rules
from planner.emit.targets.megatron_lm import megatron_flags
from planner.errors import LayoutError, ModelError
from planner.language.graph import ModelGraph
from planner.language.ops.families.products.narrow import plain_op
from planner.language.templates import Transformer, build_transformer
from profiles import load_profile
from search import SearchRequest, find_plan
from tests.emit.readers import V02, assert_documented, load_torchtitan
from tests.emit.views import view_of

TITAN, TOML = find_emitter("torchtitan"), find_emitter("torchtitan-toml")
MEGATRON = find_emitter("megatron-lm")
CELLS = {"pp": 1, "vpp": 1, "tp": 2, "gpus": 8, "global_batch": 8, "layers": 4, "dp": ""}
SMALL = Transformer(
    layers=4, hidden=4096, heads=32, kv_heads=8, ffn_hidden=11008, vocab=1024, seq_len=2048
)


def narrow_view(precision: str, graph: ModelGraph | None = None, **cells) -> PlanView:
    """A plan of Llama 3 8B's sizes, its layers in 8 bits."""
    wide = view_of(**CELLS | {"zero_stage": 3} | cells)
    plan = wide.plan.model_copy(update={"precision": precision, "execution": "torchtitan-compiled"})
    return PlanView(plan=plan, graph=graph or with_narrow_products(wide.graph, precision))


def with_wide_layer(view: PlanView, layer: int, products: int | None = None) -> PlanView:
    """The same with a layer, or its first products, in 16 bits."""
    graph = view.graph
    index = next(b.index for b in graph.blocks if f".layers.{layer}" in b.name)
    program = graph.classes[graph.blocks[index].class_index]
    left = len(program.ops) if products is None else products
    ops = []
    for op in program.ops:
        plain = plain_op(op)
        is_changed = plain is not op and left > 0
        left -= is_changed
        ops.append(plain if is_changed else op)
    classes = (*graph.classes, replace(program, ops=tuple(ops)))
    blocks = tuple(
        replace(block, class_index=len(graph.classes)) if block.index == index else block
        for block in graph.blocks
    )
    return PlanView(plan=view.plan, graph=replace(graph, classes=classes, blocks=blocks))


def why_not(view: PlanView, emitter) -> str:
    return next((r.why for r in refusals(view, emitter) if r.feature == "precision"), "")


def test_megatron_has_the_recipe_of_a_scale_a_tensor(tmp_path):
    """With scales that are powers of two; its rules take the flags, and its door reads them."""
    view = narrow_view("fp8-tensorwise", zero_stage=1)
    assert not why_not(view, MEGATRON)
    flags = megatron_flags(view)
    told = {name: flags[name] for name in ("bf16", "fp8-format", "fp8-recipe")}
    assert told == {"bf16": "", "fp8-format": "hybrid", "fp8-recipe": "tensorwise"}
    run = Run(
        flags=parse_flags(" ".join(f"--{n} {v}" for n, v in flags.items())), num_devices=8, model={}
    )
    assert broken_rules(run) == []
    assert _precision(run) == ("fp8-tensorwise", "")
    script = emit(view, MEGATRON).files["megatron-lm.sh"]
    assert "export NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1" in script
    assert "NVTE" not in emit(view_of(), MEGATRON).files["megatron-lm.sh"]


def test_megatron_has_the_recipe_of_a_scale_a_block():
    view = narrow_view("mxfp8", zero_stage=1)
    assert not why_not(view, MEGATRON)
    flags = megatron_flags(view)
    told = {name: flags[name] for name in ("bf16", "fp8-format", "fp8-recipe")}
    assert told == {"bf16": "", "fp8-format": "e4m3", "fp8-recipe": "mxfp8"}
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    run = Run(flags=parse_flags(words), num_devices=8, model={})
    assert broken_rules(run) == []
    assert _precision(run) == ("mxfp8", "")
    assert "NVTE" not in emit(view, MEGATRON).files["megatron-lm.sh"]


def test_other_recipes_of_megatron_are_searched_in_bf16_and_told():
    words = "--bf16 --fp8-format hybrid"
    for more, precision, says in (
        ("", "bf16", "--fp8-format hybrid with its usual scales is in no plan"),
        (
            "--fp8-recipe blockwise",
            "bf16",
            "with blockwise scales is in no plan: it is searched in",
        ),
        ("--fp8-recipe mxfp8", "mxfp8", "hybrid: gradients of plans are in e4m3"),
        ("--fp8-recipe tensorwise", "fp8-tensorwise", ""),
    ):
        run = Run(flags=parse_flags(f"{words} {more}"), num_devices=1, model={})
        found, told = _precision(run)
        assert found == precision
        assert says in told
        assert bool(says) == bool(told)


def test_torchtitans_configuration_converts_what_the_plan_has(tmp_path, monkeypatch):
    view = narrow_view("fp8")
    assert not why_not(view, TITAN)
    config = load_torchtitan(emit(view, TITAN).files, tmp_path, monkeypatch)
    assert config.model_spec.model == (
        "model", ("Float8LinearConverter", "rowwise", ("lm_head",), True)
    )  # fmt: skip
    assert config.compile.enable is True
    assert config.training.mixed_precision_param == "bfloat16"
    left_out = with_wide_layer(view, 2)
    config = load_torchtitan(emit(left_out, TITAN).files, tmp_path, monkeypatch)
    assert config.model_spec.model[1][2] == ("lm_head", "layers.2.")


def test_torchtitan_is_told_the_layers_that_it_converts_to_blocks(tmp_path, monkeypatch):
    """By parts of their names: it skips none, so broken tiles and routers are refused."""
    view = with_wide_layer(narrow_view("mxfp8"), 2)
    assert not why_not(view, TITAN)
    config = load_torchtitan(emit(view, TITAN).files, tmp_path, monkeypatch)
    named = ("layers.0.", "layers.1.", "layers.3.")
    assert config.model_spec.model == ("model", ("MXFP8LinearConverter", named, True))
    assert "scaled as mxfp8 scales them" in why_not(view, TOML)
    short = narrow_view("mxfp8", seq_len=1040)
    assert "in multiples of 32, and a microbatch has 1040 on a rank" in why_not(short, TITAN)
    graph = build_transformer(replace(SMALL, ffn_hidden=11024))  # 16 * 689
    broken = narrow_view("mxfp8", graph=with_narrow_products(graph, "mxfp8"))
    says = "of layer 0 some linear layers are in 16 bits, as their dims are no multiples of 32"
    assert says in why_not(broken, TITAN)
    experts = narrow_view("mxfp8", model="mixtral-8x7b", zero_stage=3, tp=1, ep=2)
    assert "torchtitan would convert routers of experts" in why_not(experts, TITAN)


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensorwise"])
def test_an_older_toml_is_read_back(precision, tmp_path):
    view = narrow_view(precision)
    assert not why_not(view, TOML)
    path = tmp_path / "run.toml"
    text = emit(view, TOML).files["torchtitan.toml"]
    path.write_text(text.replace("[model]", '[model]\nname = "llama3"\nflavor = "8B"'))
    sections = tomllib.loads(text)
    for section, values in sections.items():
        assert_documented(values, V02[section])
    run = run_of(path, Asked(gpus=8))
    assert run.trained["precision"] == precision
    assert run.trained["execution"] == "torchtitan-compiled"
    assert run.dtype == ("fp8 rowwise" if precision == "fp8" else "fp8")
    assert read(path, Asked(gpus=8)).trained["precision"] == precision


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ('"rowwise_with_gw_hp"', "multiplies as fp8 rowwise_with_gw_hp, which no plan does"),
        ('"magic"', "it takes tensorwise, rowwise, rowwise_with_gw_hp"),
        ("3", "it takes a value like ''"),
    ],
)
def test_recipes_of_no_plan_are_refused(written, says, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["quantize.linear.float8"]\n'
        f"[quantize.linear.float8]\nrecipe_name = {written}\n"
    )
    with pytest.raises(ModelError, match=r"run\.toml") as refused:
        read(path, Asked(gpus=8))
    assert says in str(refused.value)


def test_what_a_system_casts_otherwise_is_refused_by_name():
    rowwise, tensorwise = narrow_view("fp8"), narrow_view("fp8-tensorwise")
    assert "scaled as fp8 scales them; use `precision` fp8-tensorwise" in why_not(rowwise, MEGATRON)
    assert "scaled as fp8-tensorwise scales them; use `precision` fp8" in why_not(tensorwise, TITAN)
    bridge = why_not(tensorwise, find_emitter("megatron-bridge"))
    assert "Megatron-Bridge has no products in 8-bit floats scaled as fp8-tensorwise scales" in (
        bridge
    )
    wide = with_wide_layer(tensorwise, 1)
    assert "some linear layers of layer 1 are in 16" in why_not(wide, MEGATRON)
    assert not why_not(wide, TOML)
    partly = with_wide_layer(rowwise, 1, products=1)
    assert "leaves whole layers in 16 bits, and of layer 1 some" in why_not(partly, TITAN)
    short = narrow_view("fp8", seq_len=1000)
    assert "in multiples of 16, and a microbatch has 1000 on a rank" in why_not(short, TITAN)


@pytest.mark.parametrize(
    ("execution", "precision", "device"),
    [
        ("torchtitan-compiled", "fp8", "h100-sxm5-80gb"),
        ("megatron", "fp8-tensorwise", "h100-sxm5-80gb"),
        ("torchtitan-compiled", "mxfp8", "b200-sxm"),
        ("megatron", "mxfp8", "b200-sxm"),
    ],
)
def test_a_plan_searched_for_a_system_is_faster_in_8_bits_and_written(execution, precision, device):
    profile = load_profile(device)
    request = SearchRequest(
        num_devices=2, global_batch=8, execution=execution, precision="bf16", tp=1, pp=1
    )
    graph = build_transformer(SMALL)
    wide = find_plan(graph, profile, request).plan
    narrow_graph = with_narrow_products(graph, precision)
    plan = find_plan(narrow_graph, profile, replace(request, precision=precision)).plan
    assert wide is not None
    assert plan is not None
    assert 0.5 < plan.estimate["step_s"] / wide.estimate["step_s"] < 0.95
    view = PlanView(plan=plan, graph=narrow_graph)
    assert refusals(view, find_emitter(execution.partition("-")[0])) == ()
    other = "fp8" if execution == "megatron" else "fp8-tensorwise"
    with pytest.raises(LayoutError, match="has no products in 8-bit floats scaled as"):
        find_plan(narrow_graph, profile, replace(request, precision=other))


def test_experts_in_8_bits_are_converted_where_a_system_scales_their_rows(tmp_path, monkeypatch):
    cells = {"model": "mixtral-8x7b", "zero_stage": 3, "tp": 1, "ep": 2}
    view = narrow_view("fp8", **cells)
    assert not why_not(view, TITAN)
    config = load_torchtitan(emit(view, TITAN).files, tmp_path, monkeypatch)
    assert config.model_spec.model[1:] == (
        ("Float8LinearConverter", "rowwise", ("lm_head", "router.gate"), True),
        ("Float8GroupedExpertsConverter", True),
    )
    assert "has experts in 16 bits alone" in why_not(view, TOML)
    # With a scale a tensor experts stay in 16 bits.
    tensorwise = narrow_view("fp8-tensorwise", **cells)
    assert not why_not(tensorwise, TOML)
    assert "some experts of layer 0 are in 16" in why_not(tensorwise, MEGATRON)

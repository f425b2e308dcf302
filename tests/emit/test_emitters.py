"""V12, X11: what all emitters share. The recipe of docs/contributing.md is performed here."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.emit.emitter import (
    EMITTERS,
    Emitted,
    Emitter,
    Lines,
    Refusal,
    Rule,
    emit,
    find_emitter,
    refusals,
    register_emitter,
)
from planner.emit.features import DECIDES_NOTHING, plan_features, used_features
from planner.emit.start import runs_by_apply
from planner.emit.view import PlanView
from planner.errors import PlanError
from planner.language.graph import Unit
from planner.language.plan import ModelRef, Plan, StagePlan
from planner.language.plan.parts import Bucket
from tests.emit.views import changed, view_of


def test_every_field_of_a_plan_is_a_feature():
    accounted = {field for feature in plan_features() for field in feature.fields}
    fields = {*Plan.model_fields, *StagePlan.model_fields, *ModelRef.model_fields}
    assert accounted | DECIDES_NOTHING == fields


@pytest.fixture
def toy():
    """The recipe: a record and a function that writes."""
    emitter = register_emitter(
        Emitter(
            name="toy",
            summary="a line of text",
            expresses={"dp": "the first number", "microbatches": "the second", "precision": "-"},
            write=lambda view: Emitted(
                files={"toy.txt": f"{view.plan.dp} {view.plan.num_microbatches}\n"}
            ),
        )
    )
    yield emitter
    del EMITTERS["toy"]


def test_a_new_emitter_is_a_record_and_refuses_by_name_what_it_has_no_entry_for(toy):
    assert find_emitter("toy") is toy
    flat = view_of(tp=1, pp=1, vpp=1, dp=8, gpus=8, zero_stage=0)
    assert emit(flat, toy).files == {"toy.txt": "8 8\n"}
    view = view_of()
    named = [refusal.feature for refusal in refusals(view, toy)]
    assert named == ["tp", "pp", "vpp", "cuts", "schedule", "zero", "layouts"]
    with pytest.raises(PlanError, match=r"toy can't express this plan: tp: the plan has tp=2; "):
        emit(view, toy)


def test_all_that_a_plan_may_hold_is_refused_by_an_emitter_without_entries():
    view = view_of(recompute="selective", ep=2, num_experts=8, cp=2, gpus=32)
    stages = tuple(
        stage.model_copy(
            update={
                "recompute_last": False,
                "activations_on_host": True,
                "device_group": "old",
                "own_sizes": (("tp", 4),),
                "pp_rank": 3 - stage.pp_rank,
            }
        )
        for stage in view.plan.stages
    )
    bucket = Bucket(inputs=view.plan.model.inputs, fingerprint="0" * 64)
    model = view.plan.model.model_copy(update={"buckets": (bucket,), "unit": Unit(size=2)})
    degrees = view.plan.degrees.with_sizes(rp=2, hp=2)
    own = {"degrees": degrees, "optimizer_on_host": True, "precision": "model", "model": model}
    own |= {"shares": (1, 3), "tables_on_host": ("word_embeddings.weight",)}
    full = changed(view, stages=stages, **own).plan
    # (The last is known with a graph.)
    silent = {"receive-ahead", "kernels", "overlap", "logits", "whole-batch"}
    assert set(used_features(full)) == {f.name for f in plan_features()} - silent


def test_frozen_parameters_are_noted():
    view = view_of()
    megatron, torchrun = find_emitter("megatron-lm"), find_emitter("torchrun")
    assert not any("frozen" in note for note in emit(view, megatron).notes)
    table = view.graph.blocks[0].params[0]
    tensors = tuple(
        replace(t, requires_grad=False) if t.name == table else t for t in view.graph.tensors
    )
    frozen = PlanView(plan=view.plan, graph=replace(view.graph, tensors=tensors))
    assert any(
        note.startswith("frozen in the model: 1 parameters")
        for note in emit(frozen, megatron).notes
    )
    assert not any("frozen" in note for note in emit(frozen, torchrun).notes)


def test_a_name_is_known_or_the_nearest_is_told(toy):
    with pytest.raises(PlanError, match="did you mean 'megatron-lm'"):
        find_emitter("megatron-l")
    assert find_emitter("megatron") is find_emitter("megatron-lm")
    assert find_emitter("titan") is find_emitter("torchtitan")
    with pytest.raises(PlanError, match="is called 'toy' already"):
        register_emitter(toy)
    with pytest.raises(PlanError, match="expresses 'colour', which no plan has"):
        register_emitter(
            Emitter(name="other", summary="", expresses={"colour": ""}, write=toy.write)
        )


def test_only_what_a_system_does_of_its_own_may_be_accepted(toy):
    with pytest.raises(PlanError, match="toy differs from this plan in nothing that may be"):
        refusals(view_of(accepted=("pp",)), toy)


def test_an_accepted_difference_is_a_note_and_no_refusal(toy):
    rule = Rule(how="-", unless=lambda view: "it is not", instead="its own")
    system = replace(toy, expresses={**toy.expresses, "tp": rule}, executions=("fsdp-flash",))
    view = view_of(pp=1, vpp=1, dp=8, zero_stage=0)
    view = changed(view, layouts=())
    (refused,) = refusals(view, system)
    assert refused == Refusal(feature="tp", used="tp=2", why="it is not", instead="its own")
    assert str(refused) == "tp: the plan has tp=2; it is not; `accept` tp has its own instead"
    accepted = replace(view, accepted=("tp",))
    assert emit(accepted, system).notes[0] == (
        "tp differs from the plan, as accepted: toy has its own"
    )
    with pytest.raises(PlanError, match="`accept` dp was given; toy has this of its own: tp"):
        refusals(replace(view, accepted=("tp", "dp")), system)


def test_a_plan_priced_for_another_runtime_says_so(toy):
    flat = view_of(tp=1, pp=1, vpp=1, dp=8, gpus=8, zero_stage=0)
    other = replace(toy, executions=("fsdp-flash",))
    priced = "the plan is priced for ours-eager; a search with `execution` fsdp-flash prices plans"
    assert emit(changed(flat, execution="ours-eager"), other).notes[0].startswith(priced)
    assert emit(changed(flat, execution="fsdp-flash"), other).notes == ()


def test_lines_end_with_a_line_s_end():
    lines = Lines()
    lines.add("first", "")
    lines.add("last")
    assert str(lines) == "first\n\nlast\n"


def test_the_documentation_has_every_emitter_and_what_it_expresses():
    text = (Path(__file__).parents[2] / "docs" / "emit.md").read_text()
    for name, emitter in EMITTERS.items():
        if emitter.expresses == runs_by_apply():
            assert name in text.partition("## Where it runs: ")[2].splitlines()[0]
            continue
        section = text.partition(f"### {name}\n")[2].partition("\n##")[0]
        assert emitter.summary[1:] in section, name
        if emitter.expresses == find_emitter("megatron-lm").expresses and name != "megatron-lm":
            assert "what megatron-lm does" in section
            continue
        for feature, rule in emitter.expresses.items():
            how, instead = (rule, "") if isinstance(rule, str) else (rule.how, rule.instead)
            assert f"| {feature} | {how} | {instead} |" in section, (name, feature)


def test_the_documentation_lists_every_feature():
    text = (Path(__file__).parents[2] / "docs" / "emit.md").read_text()
    listed = text.partition("(`planner/emit/features.py`): ")[2].partition(".")[0]
    silent = {"receive-ahead", "kernels", "overlap", "logits"}  # written for no system
    assert set(listed.replace("\n", " ").split(", ")) == {f.name for f in plan_features()} - silent

"""N17: Models of which a part is frozen, and LoRA adapters, on every layout: trained as one
process.

Stages before the first trained parameter have no backward; units of FSDP2 have frozen and trained
parameters, or frozen ones alone; verify holds what is frozen to every bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.capture.source.model_file import ModelSource
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.verify import compare_with_one_process
from planner.runtime.step.engine import Engine
from tests.captures import capture_module
from tests.frozen import frozen_models
from tests.runtime.scenarios import RTOL, capture, check, clip_many
from tests.spawn import run_ranks

ONE = {
    "one": {"num_microbatches": 2},
    "full": {"recompute": "full", "num_microbatches": 2},
    "selective": {"recompute": "selective"},
}
TWO = {
    "dp2": {"dp": 2},
    "dp2-zero1": {"dp": 2, "zero_stage": 1, "num_microbatches": 2},
    "dp2-zero2": {"dp": 2, "zero_stage": 2, "num_microbatches": 2},
    "dp2-zero3": {"dp": 2, "zero_stage": 3, "num_microbatches": 2},
    "dp2-zero3-full": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp2": {"tp": 2},
    "tp2-selective": {"tp": 2, "recompute": "selective"},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp2-full": {"pp": 2, "num_microbatches": 4, "recompute": "full"},
    "pp2-zb_h1": {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
    "pp2-zb_h1-full": {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1", "recompute": "full"},
}
VIRTUAL = {"pp2-zb_v": {"pp": 2, "vpp": 2, "num_microbatches": 4, "schedule": "zb_v"}}
FOUR = {
    "dp2-pp2-zero1": {"dp": 2, "pp": 2, "num_microbatches": 4, "zero_stage": 1},
    "dp2-pp2-zero3": {"dp": 2, "pp": 2, "num_microbatches": 4, "zero_stage": 3},
    "dp2-tp2-zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "dp2-tp2-zero3": {"dp": 2, "tp": 2, "zero_stage": 3},
}
LORA = [name for name in frozen_models() if name.startswith("lora")]
GPTS = [name for name in frozen_models() if name.startswith("gpt")]


def test_stages_without_a_trained_parameter():
    """Only the head trains: on one rank nothing has a backward. With norms alone, every stage
    hands gradients on through frozen weights."""
    check(
        2,
        [
            ("gpt-head", TWO["pp2"]),
            ("gpt-head", TWO["pp2-zb_h1-full"]),
            ("gpt-first-half", TWO["pp2-zb_h1"]),
            ("gpt-tied-norms", TWO["pp2-full"]),
        ],
    )


@pytest.mark.slow
def test_units_of_frozen_parameters():
    """ZeRO over blocks that are frozen, that have no backward, and that are both frozen and not."""
    check(
        2,
        [
            ("gpt-second-half", TWO["dp2-zero1"]),
            ("gpt-all-but-middle", TWO["dp2-zero3"]),
            ("gpt-biases", TWO["dp2-zero3-full"]),
            ("gpt-norms", TWO["tp2"]),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", GPTS)
def test_every_layout_of_every_part(name):
    check(1, [(name, how) for how in ONE.values()])
    check(2, [(name, how) for how in (TWO | VIRTUAL).values()])


@pytest.mark.slow
@pytest.mark.parametrize("name", GPTS)
def test_four_ranks(name):
    check(4, [(name, how) for how in FOUR.values()])


def test_the_norm_is_of_trained_gradients():
    """Clipped where a stage has none, and where FSDP2 leaves frozen parameters whole."""
    cases = [
        ("gpt-head", default_plan(capture("gpt-head", torch.float64), **how))
        for how in (TWO["pp2"], TWO["dp2-zero1"], TWO["dp2-zero3"])
    ]
    for norm, expected, gap in run_ranks(clip_many, 2, cases, 1e-3)[0]:
        assert norm == pytest.approx(expected, rel=1e-10)
        assert gap < RTOL


# ---------------------------------------------------------------------------------------
# verify


def source_of(name):
    tiny = frozen_models()[name]
    return ModelSource(
        path=Path(f"{name}.py"), build=tiny.build, batch=tiny.batch, loss=tiny.loss, dependencies=()
    )


def captured(name, precision="model"):
    tiny = frozen_models()[name]
    if tiny.needs_transformers:
        pytest.importorskip("peft")
    return to_json(
        capture_module(tiny.build(), tiny.batch(2), tiny.batch(3), name=name, precision=precision)
    )


def verified(name, graph, layouts, precision="model", engine=Engine):
    """On each rank: verify a model under each layout; rank 0 returns what is too far apart."""
    graph, apart = from_json(graph), {}
    for label, layout in layouts.items():
        plan = default_plan(graph, microbatch_size=2, **layout)
        plan = plan.model_copy(update={"precision": precision})
        report = compare_with_one_process(
            plan, source_of(name), steps=2, graph=graph, make_engine=engine
        )
        if report is not None and not report.passed:
            apart[label] = str(report)
    return apart


@pytest.mark.parametrize("name", ["lora-gpt2-dropout"])
def test_lora_verifies(name):
    layouts = {label: TWO[label] for label in ("dp2-zero3", "pp2-zb_h1")}
    assert run_ranks(verified, 2, name, captured(name), layouts)[0] == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA)
def test_lora_verifies_on_every_layout(name):
    assert run_ranks(verified, 2, name, captured(name), TWO)[0] == {}
    assert run_ranks(verified, 4, name, captured(name), FOUR)[0] == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LORA, "gpt-second-half", "gpt-norms"])
def test_bf16(name):
    graph = captured(name, "bf16")
    assert run_ranks(verified, 2, name, graph, TWO, "bf16")[0] == {}


class DecayedEngine(Engine):
    """A fault: what is frozen decays, by less than any rounding of what is trained."""

    def step(self, batch):
        loss = super().step(batch)
        with torch.no_grad():
            for stage in self.stages.values():
                for param in stage.parameters():
                    if not param.requires_grad:
                        param.mul_(1 - 1e-15)
        return loss


def test_frozen_parameters_stay_as_they_are_to_every_bit():
    layouts = {"pp2": TWO["pp2"]}
    apart = run_ranks(verified, 2, "gpt-norms", captured("gpt-norms"), layouts, "model",
                      DecayedEngine)[0]  # fmt: skip
    assert set(apart) == {"pp2"}


def test_zero_1_leaves_frozen_parameters_whole():
    """Gathered every step they would cost an exchange of the whole base model."""
    held, sharded = run_ranks(bytes_held, 2)[0]
    assert held == {"trained": 0.5, "frozen": 1.0}
    assert sharded == {"trained": 0.5, "frozen": 0.5}


def bytes_held():
    """On each rank: the share it holds of trained and frozen parameters under ZeRO 1 and 3."""
    from planner.runtime.process.groups.mesh import build_mesh

    tiny, found = frozen_models()["gpt-norms"], []
    graph = capture_module(tiny.build(), tiny.batch(2), tiny.batch(3), name="gpt-norms")
    for stage in (1, 3):
        plan = default_plan(graph, dp=2, zero_stage=stage)
        engine = Engine(plan, graph, tiny.build(), build_mesh(plan, torch.device("cpu")))
        params = engine.stages[0].named_params()
        shares = {}
        for kind, trains in (("trained", True), ("frozen", False)):
            own = [p for p in params.values() if p.requires_grad is trains]
            local = sum(getattr(p, "_local_tensor", p).numel() for p in own)
            shares[kind] = local / sum(p.numel() for p in own)
        found.append(shares)
        engine.close()
    return found

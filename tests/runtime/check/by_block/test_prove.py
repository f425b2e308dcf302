"""N6: plans that are right are proven by their blocks, and what was cut or left open is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.by_block.cut import cut_down
from planner.runtime.proofs.by_block.prove import prove
from tests.captures import capture_module
from tests.runtime.check.by_block.cases import captured, plan_of, proof_of

RIGHT = {
    "plain": ("mlp", {"dp": 2, "tp": 2}),
    "skips": ("unet", {"pp": 3, "tp": 2}),
    "zero 3": ("gpt", {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 3}),
    "copies of shards": ("gpt", {"rp": 2, "dp": 2, "tp": 2, "zero_stage": 3}),
    "several stages a rank": ("gpt", {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "tp": 2}),
    "zero bubble": ("gpt", {"pp": 2, "schedule": "zb_h1", "num_microbatches": 4}),
    "parts of sequences": ("hf-llama", {"tp": 2, "cp": 2, "pp": 2}),
    "fused projections": ("hf-gpt2", {"tp": 2, "cp": 2}),
    "experts": ("hf-mixtral", {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1}),
    "unlike stages": (
        "gpt", {"pp": 2, "tp": 2, "dp": 2, "by_stage": {"tp": (4, 1)}, "microbatch_size": 4},
    ),
    "tied": ("tied-embedding", {"pp": 2, "tp": 2, "dp": 2}),
    "statistics": ("batchnorm-resnet", {"tp": 2, "pp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_plan_is_proven(name):
    """N6: no false alarm, and differences near rounding."""
    model, options = RIGHT[name]
    proof = proof_of(model, **options)
    assert proof.passed, [part.faults for part in proof.parts if part.faults]
    assert len(proof.parts) == 8
    (blocks,) = (part for part in proof.parts if part.times_rounding is not None)
    assert blocks.times_rounding < 5
    assert any("random" in cut for cut in proof.cuts)
    assert any("loading of data" in each for each in proof.unproven)


def test_a_plan_with_logits_in_chunks_is_proven():
    """N6: the loss itself, on divided vocabularies, in chunks smaller than what it is run on."""
    plan = plan_of("gpt", tp=2, pp=2).model_copy(update={"logit_rows": 7})
    proof = proof_of("gpt", plan)
    assert proof.passed, [part.faults for part in proof.parts if part.faults]


class Tokens(nn.Module):
    """Sequences of 64 that a mean of neighbours mixes."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, ids):
        x = self.token(ids)
        x = x + torch.tanh(x.roll(1, 1))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _source(build=Tokens):
    def batch(size):
        return {"ids": torch.arange(64).remainder(32).repeat(size, 1)}

    return ModelSource(path=Path("m.py"), build=build, batch=batch, loss=None, dependencies=())


def test_sequences_are_cut_down_by_a_capture_of_their_own():
    """N6: the width stays; the notes say what was cut."""
    source = _source()
    graph = capture_module(Tokens(), source.batch(2), source.batch(3))
    plan = default_plan(graph, tp=2, microbatch_size=4)
    proof = prove(plan, graph, source)
    assert proof.passed, proof
    assert any("from 64 to 16 positions" in cut for cut in proof.cuts)
    assert any("from 4 samples" in cut for cut in proof.cuts)


class Lengthy(Tokens):
    """It does something else on short sequences."""

    def forward(self, ids):
        loss = super().forward(ids)
        return loss if ids.shape[1] < 64 else 2 * loss


def test_a_sequence_that_matters_is_not_cut():
    source = _source(Lengthy)
    graph = capture_module(Lengthy(), source.batch(2), source.batch(3))
    proof = prove(default_plan(graph, tp=2), graph, source)
    assert proof.passed
    assert any("planned 64 positions" in cut for cut in proof.cuts)


class Patches(nn.Module):
    """It makes a sequence of 64 of a batch that has none."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, image):
        x = torch.tanh(self.inner(image.unflatten(1, (64, 8))))
        return self.outer(x).square().mean()


def test_a_sequence_that_the_batch_does_not_have_is_not_cut():
    def batch(size):
        return {"image": torch.linspace(-1, 1, 512).repeat(size, 1)}

    source = ModelSource(path=Path("m.py"), build=Patches, batch=batch, loss=None, dependencies=())
    graph = capture_module(Patches(), batch(2), batch(3))
    proof = prove(default_plan(graph, tp=2), graph, source)
    assert proof.passed
    assert not any("were cut from" in cut for cut in proof.cuts)


def test_little_memory_means_fp32_and_then_open_classes():
    """N6: what does not fit is named, not passed over."""
    graph, source = captured("gpt")
    plan = plan_of("gpt", tp=2)
    cut = cut_down(graph, plan, source, memory_bytes=0)
    sizes = sorted(num_bytes for _, num_bytes in cut.too_large)
    assert len(sizes) == len(graph.classes)
    proof = proof_of("gpt", plan, memory_bytes=sizes[-1])
    assert proof.passed
    assert any("fp32" in cut for cut in proof.cuts)
    assert not any("was not run" in each for each in proof.unproven)
    proof = proof_of("gpt", plan, memory_bytes=sizes[-1] - 1)
    left_out = [each for each in proof.unproven if "was not run" in each]
    assert len(left_out) == sizes.count(sizes[-1])
    (blocks,) = (part for part in proof.parts if part.name.startswith("blocks"))
    assert blocks.counted.startswith(f"{len(sizes) - len(left_out)} classes")


def test_a_plan_that_can_not_run_is_refused():
    plan = plan_of("hf-mixtral", dp=2)
    with pytest.raises(PlanError, match="verify without `by_block`"):
        proof_of("hf-mixtral", plan.model_copy(update={"degrees": plan.degrees.with_sizes(ep=2)}))

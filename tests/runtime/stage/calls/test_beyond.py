"""Labels and ids beyond a model's classes and rows end a run, as they do in one process, also where
ranks divide these and mask what others have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.calls.losses.in_chunks import cross_entropy_in_chunks
from planner.runtime.stage.compiled.kernels import op_by_op
from planner.runtime.step import engine as engines
from tests.builders import VOCABULARY
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

IGNORED = -100
CLASSES, WIDTH, ROWS = 6, 4, 3


def results(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """By function that masks: what it makes of labels, or of ids."""
    generator = torch.Generator().manual_seed(0)
    weight, x, logits = (
        torch.randn(size, generator=generator)
        for size in ((CLASSES, WIDTH), (ROWS, WIDTH), (ROWS, CLASSES))
    )
    ids = numbers.masked_fill(numbers == IGNORED, 0)
    return {
        "loss": local_ops.vocab_cross_entropy(logits, numbers, 0, IGNORED, 0.0, ""),
        "log likelihood": local_ops.vocab_nll_loss(logits, numbers, 0, IGNORED, ""),
        "loss in chunks": cross_entropy_in_chunks(
            x, weight, None, numbers, True, (), 0, IGNORED, 0.0, 2
        ),
        "embedding": local_ops.vocab_embedding(weight, ids, -1, "").sum(-1),
    }


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_number_beyond_is_refused_where_its_value_is_at_hand(wrong):
    told = rf"is {wrong}, and there are 0 to {CLASSES - 1}.* give numbers in that range"
    with pytest.raises(IndexError, match=told):
        results(torch.tensor([1, wrong, IGNORED]))


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_elsewhere_it_makes_nan(monkeypatch, wrong):
    """As on a device, which the host does not wait for; what is ignored makes none."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    for name, made in results(torch.tensor([1, wrong, IGNORED])).items():
        assert made.isnan().tolist() == [False, True, False], name
    for name, made in results(torch.tensor([1, 0, IGNORED])).items():
        assert not made.isnan().any(), name


def errors_of(plans: list[Plan]) -> list[str]:
    """What a step says of a batch with a label, and of one with an id, beyond the vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "compiled", op_by_op)
        found = []
        for plan in plans:
            for name in ("labels", "ids"):
                tiny, module = build("small-gpt")
                engine = planner.apply(plan, module)
                batch = tiny.batch(plan.global_batch)
                batch[name][-1, 3] = VOCABULARY
                with pytest.raises(IndexError) as raised:
                    engine.step(batch)
                found.append(str(raised.value))
                engine.close()
        return found


def test_a_step_with_such_a_batch_is_refused_by_every_rank():
    """With a divided vocabulary, logits in chunks, and kernels that are compiled."""
    plan = default_plan(capture("small-gpt"), tp=2, num_microbatches=1)
    changes: list[dict[str, Any]] = [{"logit_rows": 7}, {"kernels": "compiled"}]
    plans = [plan.model_copy(update=change) for change in changes]
    for told in run_ranks(errors_of, 2, plans):
        assert len(told) == 2 * len(plans)
        assert all(f"is {VOCABULARY}, and" in each for each in told), told

"""Batches that do not divide evenly, and losses that are means over tokens (fp64, 1e-10).

P23 (batches cut: structure, None and plain values, ids in range), G4 (a batch that the
microbatches do not divide), M6 (mean and token-weighted mean over replicas).
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import LayoutError, ModelError, PlanError
from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.count_tokens import count_tokens
from tests.builders import VOCABULARY, PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.runtime.scenarios import capture, models
from tests.spawn import run_ranks

RTOL = 1e-10


@dataclass(frozen=True)
class Case:
    """A model under a plan, given batches of these sizes; with labels that do not count, of which
    the engine is told by `loss_weight`, or finds them itself.
    """

    model: str
    plan: Plan
    sizes: tuple[int, ...]
    counts_tokens: bool = False
    is_told: bool = False


def batch_of(case: Case, size: int) -> dict[str, torch.Tensor]:
    batch = models()[case.model].batch(size)
    if case.counts_tokens:
        # Sample i has i labels that count: the first microbatch has none at all.
        labels = batch["labels"].clone()
        for i in range(size):
            labels[i, i:] = -100
        batch["labels"] = labels
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def gaps_to_one_process(cases: list[Case]) -> list[float]:
    """The largest relative gap of loss, gradients and updated parameters of each case."""
    torch.set_default_dtype(torch.float64)
    return [_gap_of(case) for case in cases]


def _gap_of(case: Case) -> float:
    torch.manual_seed(0)
    module = models()[case.model].build()
    alone = OneProcess(module, sgd)
    weight = planner.count_tokens("labels") if case.is_told else None
    engine = planner.apply(case.plan, module, optimizer=sgd(module), loss_weight=weight)
    batches = [batch_of(case, size) for size in case.sizes]
    return train_beside(engine, alone, batches, evaluates=True, gap=gap_to_largest).largest


def _plan(model: str, **choices: Any) -> Plan:
    return default_plan(capture(model, torch.float64), **choices)


def test_uneven_batches_equal_one_process():
    """P23, G4, M6: every sample counts the same, whatever microbatch and replica it is in."""
    cases = [
        Case("gpt", _plan("gpt", pp=2, num_microbatches=3, microbatch_size=2), (6, 5, 4, 3, 5)),
        Case("gpt", _plan("gpt", dp=2, num_microbatches=2, microbatch_size=2), (7, 5, 8)),
        Case("gpt", _plan("gpt", tp=2, num_microbatches=2, microbatch_size=3), (5,)),
        Case(
            "gpt",
            _plan("gpt", dp=2, num_microbatches=2, microbatch_size=2, zero_stage=2),
            (5,),
        ),
        Case(
            "unet",
            _plan("unet", pp=2, num_microbatches=2, microbatch_size=3, recompute="full"),
            (5, 6),
        ),
        Case(
            "gpt",
            _plan("gpt", pp=2, num_microbatches=3, microbatch_size=2, recompute="selective"),
            (5,),
        ),
        Case(
            "gpt",
            _plan("gpt", pp=2, num_microbatches=3, microbatch_size=2, schedule="zb_h1"),
            (4,),
        ),
        Case("tied-gpt", _plan("tied-gpt", pp=2, num_microbatches=3, microbatch_size=2), (5,)),
    ]
    gaps = run_ranks(gaps_to_one_process, 2, cases)[0]
    for case, gap in zip(cases, gaps, strict=True):
        assert gap < RTOL, f"{case.sizes} under {case.plan.schedule} {case.plan.dp=}: {gap}"


def test_uneven_batches_on_other_axes_equal_one_process():
    """G4, D12, D19: sequences cut in every sample, however many; stages of their own mesh."""
    graph = capture("gpt", torch.float64)
    two = {"cp": 2, "dp": 2, "microbatch_size": 2}
    own = default_plan(graph, tp=2, pp=2, by_stage={"tp": (2, 1)}, microbatch_size=4)
    cases = [
        Case("gpt", default_plan(graph, **two), (5,)),
        # (Every op on all tp ranks: layouts found for four samples may cut by sample.)
        Case("gpt", own.model_copy(update={"layouts": ()}), (13,)),
    ]
    for case, gap in zip(cases, run_ranks(gaps_to_one_process, 4, cases)[0], strict=True):
        assert gap < RTOL, case


def test_token_weighted_loss_equals_one_process():
    """M6: uneven counts between microbatches and replicas, and a part in which none counts."""
    layouts: list[dict[str, Any]] = [{"pp": 2}, {"dp": 2}, {"tp": 2}, {"dp": 2, "zero_stage": 1}]
    cases = []
    for layout in layouts:
        full = 12 // layout.get("dp", 1)
        plan = _plan("gpt", num_microbatches=3, microbatch_size=full // 3, **layout)
        # (On tp the default layout cuts some tensors by sample, which 11 samples don't allow.)
        sizes = (12,) if "tp" in layout else (12, 11)
        told = [True, False] if "dp" in layout else [False]
        cases += [Case("gpt", plan, sizes, counts_tokens=True, is_told=each) for each in told]
    gaps = run_ranks(gaps_to_one_process, 2, cases)[0]
    for case, gap in zip(cases, gaps, strict=True):
        assert gap < RTOL, f"{case.plan.dp=} {case.plan.tp=} {case.plan.pp=}: {gap}"


class Weighted(PlainGPT):
    """Classes have weights, in a buffer that the model makes of another."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.register_buffer("rarity", torch.linspace(0.1, 3, VOCABULARY))

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).view(-1, VOCABULARY)
        return F.cross_entropy(logits, labels.view(-1), weight=self.rarity / 2, label_smoothing=0.1)


def _weighted_gap(plans: list[Plan], folder: str) -> float:
    torch.set_default_dtype(torch.float64)
    worst = 0.0
    for plan in plans:
        torch.manual_seed(0)
        module = Weighted()
        alone = OneProcess(module, sgd)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is what one process does
            engine = planner.apply(plan, module, optimizer=sgd(module))
        if dist.get_rank() == 0:
            state = alone.module.state_dict()
            save_file({**state, "rarity": state["rarity"].flip(0)}, f"{folder}/m.safetensors")
        dist.barrier(group=engine.mesh.control)
        for _ in range(2):
            batch = batch_of(Case("gpt", plan, (), counts_tokens=True), plan.global_batch)
            worst = max(worst, train_beside(engine, alone, [batch], gap=gap_to_largest).largest)
            # Other weights of classes come with other values of the model.
            alone.module.load_state_dict(load_file(f"{folder}/m.safetensors"))
            engine.load_weights(f"{folder}/m.safetensors")
        engine.close()
    return worst


def test_weights_of_classes_count_parts_of_a_batch(tmp_path):
    """M6: the mean is divided by the weights of the labels, which parts have more or less of."""
    torch.set_default_dtype(torch.float64)
    graph = capture_module(Weighted(), gpt_batch(2), gpt_batch(3))
    layouts: list[dict[str, Any]] = [{"dp": 2, "zero_stage": 3}, {"pp": 2}]
    plans = [default_plan(graph, num_microbatches=2, microbatch_size=2, **each) for each in layouts]
    assert max(run_ranks(_weighted_gap, 2, plans, str(tmp_path))) < RTOL


def test_a_weight_that_is_not_what_the_loss_is_divided_by_is_refused():
    """B2: parts count as the loss counts them, whatever a callable says."""
    torch.set_default_dtype(torch.float64)
    module = Weighted()
    plan = default_plan(
        capture_module(module, gpt_batch(2), gpt_batch(3)), num_microbatches=2, microbatch_size=2
    )
    batch = batch_of(Case("gpt", plan, (), counts_tokens=True), 4)
    state = copy.deepcopy(module.state_dict())

    def weights(part: Any) -> float:
        labels = part["labels"].flatten()
        return state["rarity"][labels[labels >= 0]].sum().item()

    engine = planner.apply(plan, copy.deepcopy(module), loss_weight=weights)
    engine.step(batch)
    engine.close()
    engine = planner.apply(plan, module, loss_weight=planner.count_tokens("labels"))
    with pytest.raises(
        ModelError,
        match=r"loss_weight counts \[1.0, 5.0\] in parts of the batch, and the loss is divided by ",
    ):
        engine.step(batch)


def test_means_over_tokens_and_over_samples_differ():
    """M6: labels count as the loss counts them; a user's weight says the same, or is refused."""
    torch.manual_seed(0)
    plan = default_plan(capture("gpt"), num_microbatches=4)
    batch = gpt_batch(4)
    batch["labels"][0, 1:] = -100
    module = PlainGPT()
    expected = module(**batch).item()
    by_sample = torch.stack(
        [module(**{k: v[i : i + 1] for k, v in batch.items()}) for i in range(4)]
    )
    weights = (lambda part: len(part["ids"]), planner.count_tokens("labels"), None)
    samples, told, found = (
        planner.apply(plan, copy.deepcopy(module), loss_weight=weight) for weight in weights
    )
    with pytest.raises(ModelError, match="loss_weight counts"):
        samples.step(batch)
    assert told.step(batch).item() == pytest.approx(expected, rel=1e-6)
    assert found.step(batch).item() == pytest.approx(expected, rel=1e-6)
    assert abs(by_sample.mean().item() - expected) > 1e-3
    none = batch | {"labels": torch.full_like(batch["labels"], -100)}
    for engine in (told, found):
        with pytest.raises(ModelError, match="the batch has no label that is not ignored, so it h"):
            engine.step(none)
    with pytest.raises(ModelError, match=r"no such tensor in the batch, which has ids, labels"):
        planner.count_tokens("targets")(batch)


class TwoHeads(PlainGPT):
    """A mean over labels and one over samples, as of masked words and of sentences."""

    def forward(self, ids, labels):
        return super().forward(ids, labels) + self.head(self.token(ids)).square().mean()


def test_terms_that_count_parts_differently_are_each_of_the_whole_batch():
    """B2: a mean over labels and one over samples; a batch with neither in proportion."""
    torch.set_default_dtype(torch.float64)
    module = TwoHeads()
    plan = default_plan(
        capture_module(module, gpt_batch(2), gpt_batch(3)), num_microbatches=2, microbatch_size=2
    )
    batch = gpt_batch(4)
    batch["labels"][0, 1:] = -100
    expected = module(**batch)
    expected.backward()
    engine = planner.apply(plan, copy.deepcopy(module))
    assert engine.step(batch).item() == pytest.approx(expected.item(), rel=RTOL)
    grads = {n: p.grad for n, p in module.named_parameters()}
    assert gap_to_largest(engine.full_gradients(), grads) < RTOL
    # Of batches in a row no weight of their gradients gives both means.
    engine.step(batch, update=False)
    with pytest.raises(PlanError, match="terms of the loss count the batches of an update diff"):
        engine.step(gpt_batch(4))


def test_tokens_are_counted_as_the_loss_counts_them():
    labels = torch.tensor([[1, -100, 3], [-100, 5, 0]])
    assert count_tokens("labels")({"labels": labels}) == 4
    assert count_tokens("labels", skip_first=True)({"labels": labels}) == 3
    assert count_tokens("1", ignore_index=0)((None, labels)) == 5


def step_of_another_size(plan: Plan, size: int = 3) -> str:
    engine = planner.apply(plan, PlainGPT())
    try:
        engine.step(gpt_batch(size))
    except LayoutError as error:
        return str(error)
    return ""


def test_a_layout_that_cuts_samples_refuses_what_does_not_divide():
    """M8: refused on every rank alike, saying what was asked and what would do."""
    plan = default_plan(capture("gpt"), tp=2, num_microbatches=1, microbatch_size=4)
    said = run_ranks(step_of_another_size, 2, plan)
    assert said[0] == said[1]
    assert said[0].startswith("a microbatch of 3 instead of 4 samples a rank can't be run")
    assert said[0].endswith("give batches of 4")


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "num_microbatches": 1}, {"pp": 2, "num_microbatches": 2}]
)
def test_a_rank_that_could_run_its_part_refuses_what_another_cannot(sizes):
    """Of 7 samples a replica, or a microbatch, has 4 and another 3: no rank begins."""
    plan = default_plan(capture("gpt"), tp=2, microbatch_size=4, **sizes)
    said = run_ranks(step_of_another_size, 4, plan, 7)
    assert len(set(said)) == 1
    assert said[0].startswith("a microbatch of 3 instead of 4 samples a rank can't be run")


class Options(nn.Module):
    """Takes what batches of real loaders hold: nothing, numbers, strings, nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, pair, mask=None, scale=1, mode="mean"):
        x, target = pair
        x = self.fc(x) * scale
        if mask is not None:
            x = x * mask
        return F.mse_loss(x, target, reduction=mode)


def options(size: int) -> dict[str, Any]:
    x = torch.linspace(-1, 1, 3 * size).view(size, 3)
    return {"pair": (x, x.flip(0)), "mask": None, "scale": 2, "mode": "mean"}


def test_batches_keep_their_structure():
    """P23: nested tuples in dicts, None, numbers and strings; another value is refused."""
    module = Options()
    graph = capture_module(module, options(2), options(3))
    plan = default_plan(graph, num_microbatches=3, microbatch_size=2)
    expected = module(**options(5)).item()
    engine = planner.apply(plan, module)
    assert engine.evaluate(options(5)).item() == pytest.approx(expected, rel=1e-6)
    reordered = dict(reversed(options(5).items()))
    del reordered["mask"]  # as good as None
    assert engine.evaluate(reordered).item() == pytest.approx(expected, rel=1e-6)
    x = torch.ones(5, 3)
    for change, complaint in [
        ({"scale": 3}, r"batch value scale is 3 and the plan was made with 2"),
        ({"mode": None}, r"batch value mode is None and the plan was made with 'mean'"),
        ({"mask": x}, r"the batch has mask in addition; the plan was made with .*pair\.0, pair\.1"),
        ({"pair": (x,)}, r"the batch lacks pair\.1"),
        ({"pair": (x, x[:4])}, r"pair\.1 has shape \(4, 3\); for 5 samples, as pair\.0 has"),
        ({"pair": (x[:2], x[:2])}, r"the batch has 2 samples; .* take 3 to 6; give"),
        ({"pair": (x.repeat(2, 1),) * 2}, r"the batch has 10 samples; .* take 3 to 6; give"),
        ({"pair": (x, object())}, r"'pair\.1' is a object; use tensors .torch.from_numpy"),
        ({"ids": x.numpy()}, "'ids' is a ndarray; use tensors"),
    ]:
        with pytest.raises(ModelError, match=complaint):
            engine.step(options(5) | change)


def test_microbatches_are_balanced_and_ids_are_checked():
    """P23: sizes differ by at most one, parts are runs in order, ids out of range raise."""
    for num_samples, num_microbatches, dp in [(7, 3, 1), (8, 4, 2), (11, 3, 2), (29, 4, 4)]:
        split = BatchSplit.even(num_samples, num_microbatches=num_microbatches, parts=dp)
        parts = [split.part(m, dp, d) for m in range(num_microbatches) for d in range(dp)]
        assert [i for part in parts for i in part] == list(range(num_samples))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for bad in (-1, 4):
        with pytest.raises(IndexError, match=r"microbatch -?\d is not one of 0..3"):
            split.microbatch(bad)
        with pytest.raises(IndexError, match=r"part -?\d is not one of 0..3"):
            split.part(0, 4, bad)

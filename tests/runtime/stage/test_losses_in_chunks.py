"""A loss of a product's results that are made a chunk of rows at a time, as that of whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.language.graph import Program
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import local_program
from planner.language.ops.families.losses.in_chunks import LOSS_IN_CHUNKS, loss_in_chunks
from planner.language.plan import Plan
from planner.runtime.stage.calls.losses import in_chunks
from planner.runtime.stage.calls.losses.chunk_loops import Chunks
from planner.runtime.stage.compiled.kernels import compiled
from tests.builders import HIDDEN, VOCABULARY, gpt_batch
from tests.captures import capture_module
from tests.runtime.scenarios import build, capture, check_plans
from tests.runtime.stage.test_beside_collectives import split_layouts
from tests.runtime.stage.test_compiled import assert_equal, both, run
from tests.spawn import run_ranks

ROWS = 7
"""Of a chunk: no divisor of the rows of any batch."""

CAST_TO_FP32 = (("aten.to.dtype", torch.float32),)


def in_chunks_of(plan: Plan, rows: int = ROWS) -> Plan:
    """The plan with logits of so many tokens at a time."""
    return plan.model_copy(update={"logit_rows": rows})


def tensors(dtype: torch.dtype, *, transposed: bool, bias: bool) -> list[Tensor | None]:
    """Hidden states [2, 13, 8], a weight of 20 classes, a bias; some targets are ignored."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 13, 8), (20, 8) if transposed else (8, 20), *([(20,)] if bias else [])]
    made = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    return [*made, *([] if bias else [None])]


def targets() -> Tensor:
    found = torch.randint(20, (2, 13), generator=torch.Generator().manual_seed(1))
    return found.masked_fill(found % 5 == 0, -100)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("transposed", "bias"), [(True, False), (True, True), (False, True)])
def test_losses_and_gradients_are_those_of_whole_logits(reduction, smoothing, transposed, bias):
    found = []
    for rows in (0, ROWS, 100):
        x, weight, added = tensors(torch.float64, transposed=transposed, bias=bias)
        how: dict[str, Any] = {"ignore_index": -100, "label_smoothing": smoothing}
        if rows:
            number = {"none": 0, "mean": 1, "sum": 2}[reduction]
            loss = in_chunks.cross_entropy_in_chunks(
                x, weight, added, targets(), transposed, (), number, rows=rows, **how
            )
        else:
            logits = F.linear(x, weight if transposed else weight.t(), added).flatten(0, 1)
            loss = F.cross_entropy(logits, targets().flatten(), reduction=reduction, **how)
            loss = loss.view(2, 13) if reduction == "none" else loss
        # (Each row's own factor, where rows have losses.)
        (
            loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        ).sum().backward()
        found.append([loss.detach(), *(t.grad for t in (x, weight, added) if t is not None)])
    whole, *others = found
    for chunked in others:
        for expected, tensor in zip(whole, chunked, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


def test_logits_are_rounded_and_cast_as_the_model_has_them():
    """In bf16 with a cast to fp32: equal losses, gradients as close as sums in bf16 are."""
    found = []
    for rows in (0, ROWS):
        x, weight, _ = tensors(torch.bfloat16, transposed=True, bias=False)
        if rows:
            loss = in_chunks.cross_entropy_in_chunks(
                x, weight, None, targets(), True, CAST_TO_FP32, 1, -100, 0.0, rows
            )
        else:
            logits = F.linear(x, weight).float().flatten(0, 1)
            loss = F.cross_entropy(logits, targets().flatten())
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad))
    (loss, dx, dw), (other, other_dx, other_dw) = found
    assert loss.dtype == other.dtype == torch.float32
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(other_dx, dx, rtol=0, atol=0)
    torch.testing.assert_close(other_dw, dw, rtol=0.02, atol=0.02 * float(dw.abs().max()))


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_what_is_frozen_has_no_gradient_made(trained):
    x, weight, _ = tensors(torch.float64, transposed=True, bias=False)
    (weight if trained == "x" else x).requires_grad_(False)
    in_chunks.cross_entropy_in_chunks(
        x, weight, None, targets(), True, (), 1, -100, 0.0, ROWS
    ).backward()
    assert (x.grad is None, weight.grad is None) == (trained != "x", trained == "x")


def test_a_large_weights_gradient_is_added_to_its_sum(monkeypatch):
    monkeypatch.setattr(in_chunks, "LARGE_BYTES", 1)
    x, weight, _ = tensors(torch.float64, transposed=True, bias=False)
    told = (None, targets(), True, (), 1, -100, 0.0, ROWS)
    in_chunks.cross_entropy_in_chunks(x, weight, *told, adds=True).backward()
    once, held = weight.grad.clone(), weight.grad
    in_chunks.cross_entropy_in_chunks(x, weight, *told, adds=True).backward()
    assert weight.grad is held
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-12, atol=1e-12)


class Head(nn.Module):
    """A layer, and a loss that is spelled in one of many ways."""

    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled = spelled
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=spelled == "bias")

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = torch.tanh(self.layer(self.token(ids)))
        logits = self.head(x)
        if self.spelled == "tied":
            logits = x @ self.token.weight.t()
        if self.spelled == "shifted":
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        if self.spelled == "cast":
            logits = logits.float()
        if self.spelled == "capped":
            logits = 30 * torch.tanh(logits / 30)
        if self.spelled == "scaled":
            logits = (logits * 0.5).float()
        if self.spelled == "squared":
            logits = logits.square()
        if self.spelled == "classes second":
            return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)
        flat, classes = logits.reshape(-1, VOCABULARY), labels.reshape(-1)
        if self.spelled == "weighted":
            return F.cross_entropy(flat, classes, weight=torch.ones(VOCABULARY, dtype=flat.dtype))
        loss = F.cross_entropy(flat, classes)
        return loss + logits.square().mean() if self.spelled == "read twice" else loss


def head_of(spelled: str, **sizes: int) -> tuple[Plan, Program]:
    """A plan with logits in chunks, and what its ranks run for the last block."""
    graph = capture_module(Head(spelled), gpt_batch(2), gpt_batch(3), name=spelled)
    plan = in_chunks_of(default_plan(graph, **sizes))
    index = graph.blocks[-1].class_index
    return plan, local_program(graph, plan, index, degrees=plan.degrees, microbatch_size=2)


@pytest.mark.parametrize(
    "spelled", ["plain", "tied", "shifted", "cast", "bias", "classes second", "capped", "scaled"]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_is_found_however_it_is_spelled(spelled, tp):
    _, program = head_of(spelled, tp=tp)
    (found,) = (loss_in_chunks(op) for op in program.ops if op.target == LOSS_IN_CHUNKS)
    # Logits are made nowhere else.
    assert not any("cross_entropy_loss" in op.target for op in program.ops)
    assert not any(found.weight.name in op.inputs[1:] for op in program.ops[:-1])
    assert (found.rows, found.axis) == (ROWS, "tp" if tp == 2 else "")
    assert found.smoothing == (0.1 if spelled == "classes second" else 0.0)
    assert (found.bias is not None) == (spelled == "bias")
    assert len(program.tensor[found.x.name].shape) == (2 if spelled == "shifted" else 3)


@pytest.mark.parametrize("spelled", ["squared", "weighted", "read twice"])
def test_other_losses_have_whole_logits(spelled):
    _, program = head_of(spelled)
    assert not any(op.target == LOSS_IN_CHUNKS for op in program.ops)


def losses_of(cases: list[tuple[str, Plan]]) -> list[tuple[float, float]]:
    """Train two steps by a plan with whole logits and with logits in chunks; return the losses."""
    found = []
    for spelled, plan in cases:
        steps = []
        for rows in (0, ROWS):
            torch.manual_seed(0)
            module = Head(spelled)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            engine = planner.apply(in_chunks_of(plan, rows), module, optimizer=optimizer)
            batch = gpt_batch(plan.global_batch)
            engine.step(batch)
            steps.append(float(engine.step(batch)))
            engine.close()
        found.append((steps[0], steps[1]))
    return found


def test_every_spelling_trains_as_with_whole_logits():
    """On two ranks of tp; in bf16 and fp16, whose gradients are scaled, too."""
    cases = [
        (name, head_of(name, tp=2)[0])
        for name in ("tied", "shifted", "classes second", "capped", "scaled")
    ]
    for precision in ("bf16", "fp16"):
        batches = gpt_batch(2), gpt_batch(3)
        graph = capture_module(Head("cast"), *batches, name="cast", precision=precision)
        plan = default_plan(graph, tp=2, num_microbatches=2)
        cases.append(("cast", plan.model_copy(update={"precision": precision})))
    told, _ = run_ranks(losses_of, 2, cases)
    for (spelled, plan), (whole, chunked) in zip(cases, told, strict=True):
        rtol = 1e-5 if plan.precision == "model" else 2e-3
        assert chunked == pytest.approx(whole, rel=rtol), (spelled, plan.precision)


def test_trains_as_one_process_on_two_ranks():
    """With whole and divided vocabularies, replicas, stages, W jobs, recomputation, sequences that
    are divided between layers, parts of sequences, and weight gradients beside collectives.
    """
    choices: list[tuple[str, dict[str, Any]]] = [
        ("small-gpt", {"tp": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "recompute": "full"}),
        ("small-gpt", {"tp": 2, "recompute": "selective"}),
        ("small-gpt", {"dp": 2, "num_microbatches": 2}),
        ("small-gpt", {"dp": 2, "zero_stage": 3}),
        ("small-gpt", {"pp": 2, "schedule": "zb_h1"}),
        ("small-gpt", {"cp": 2}),
        ("small-tied-gpt", {"pp": 2, "num_microbatches": 3}),
        ("gpt-head", {"tp": 2}),
    ]
    plans = [
        (name, in_chunks_of(default_plan(capture(name, torch.float64), **how)))
        for name, how in choices
    ]
    _, plan = plans[0]
    beside = plan.model_copy(update={"overlap": "input-gradients"})
    # The head's vocabulary is divided, what it takes along the sequence.
    graph = capture("small-gpt", torch.float64)
    head = graph.blocks[-1].class_index
    layouts = [each for each in split_layouts(graph) if each.class_index != head]
    layouts += [each for each in plan.layouts if each.class_index == head]
    split = plan.model_copy(update={"layouts": tuple(layouts)})
    check_plans(2, [*plans, ("small-gpt", beside), ("small-gpt", split)])


@pytest.mark.slow
def test_trains_as_one_process_on_four_ranks():
    choices: list[tuple[str, dict[str, Any]]] = [
        ("small-gpt", {"tp": 2, "dp": 2, "zero_stage": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "pp": 2, "schedule": "zb_h1", "num_microbatches": 3}),
        ("small-gpt", {"tp": 2, "cp": 2, "recompute": "full"}),
        ("small-tied-gpt", {"dp": 2, "pp": 2, "zero_stage": 1, "num_microbatches": 2}),
        ("routed-gpt", {"tp": 2, "dp": 2, "ep": 2}),
    ]
    plans = [
        (name, in_chunks_of(default_plan(capture(name, torch.float64), **how)))
        for name, how in choices
    ]
    check_plans(4, plans)


@pytest.mark.parametrize("spelled", ["plain", "capped", "shifted", "bias"])
def test_a_graph_holds_each_loop_as_an_op(spelled):
    """Of a capped loss with what autograd makes of the tanh; results have the same bits."""
    _, program = head_of(spelled)
    eager, block, queue = both(program)
    loops = [
        str(node.target)
        for half in (block.halves.forward, block.halves.backward)
        for node in half.graph.nodes
        if str(node.target).startswith("planner.")
    ]
    assert loops == ["planner.numbers_in_chunks.default", "planner.gradients_in_chunks.default"]
    expected, eager_bytes = run(eager, program, queue)
    found, saved_bytes = run(block, program, queue)
    assert_equal(found, expected)
    assert saved_bytes == eager_bytes


@pytest.mark.slow
def test_a_compiler_takes_such_a_block():
    _, program = head_of("capped")
    program = replace(
        program,
        tensors=tuple(
            replace(each, dtype=each.dtype.replace("float32", "float64"))
            for each in program.tensors
        ),
    )
    eager, block, queue = both(program, compiled)
    assert_equal(run(block, program, queue)[0], run(eager, program, queue)[0], atol=1e-12)


def test_what_loops_are_told_is_spelled_and_read():
    told = Chunks(True, (("aten.mul.Tensor", 0.5), *CAST_TO_FP32), -100, 0.1, ROWS, 20, 40)
    assert Chunks.read(told.spelled()).spelled() == told.spelled()
    assert Chunks.read(told.spelled()).steps[1][1] is torch.float32
    with pytest.raises(TypeError, match="a graph holds no step on logits with"):
        told._replace(steps=(("aten.to.device", torch.device("cpu")),)).spelled()


def looked_at(plan: Plan) -> tuple[float, float, float, tuple[tuple[int, ...], ...]]:
    """Losses of an evaluation, of one that shows the logits, and of a step; their shape."""
    tiny, module = build("small-gpt")
    engine = planner.apply(plan, module)
    batch = tiny.batch(plan.global_batch)
    alone = float(engine.evaluate(batch))
    shown = float(engine.evaluate(batch, fetch=("head",)))
    sizes = tuple(tuple(value.shape) for value in engine.fetched.values())
    found = alone, shown, float(engine.step(batch)), sizes
    engine.close()
    return found


def test_an_evaluation_has_the_loss_of_a_step_and_may_look_at_logits():
    """Where logits are asked for they are made whole."""
    plan = in_chunks_of(default_plan(capture("small-gpt"), tp=2, num_microbatches=1))
    (alone, shown, trained, sizes), _ = run_ranks(looked_at, 2, plan)
    assert alone == pytest.approx(trained, rel=1e-6)
    assert shown == pytest.approx(trained, rel=1e-6)
    assert sizes == ((plan.global_batch, 16, VOCABULARY),)


def test_plans_without_the_field_are_read_and_written_as_before():
    plan = default_plan(capture("small-gpt"), tp=2)
    assert "logit_rows" not in plan.model_dump(mode="json")
    assert Plan.model_validate(in_chunks_of(plan).model_dump(mode="json")).logit_rows == ROWS

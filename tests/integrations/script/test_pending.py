"""Tensors whose values come later are, once they are read, what they would have been at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from planner.errors import PlanError
from planner.integrations.script.loss import loss_of
from planner.integrations.script.values.notes import Output, calls_of, outputs_of
from planner.integrations.script.values.outputs import Outputs
from planner.integrations.script.values.pending import Pending, pending, real, returned

ROWS, WIDTH = 4, 3


@dataclass(eq=False)
class Toy:
    """A call that returns values which are there once they are needed."""

    values: list[Tensor]
    trains: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    needed: list[int] = field(default_factory=list)
    trained: list[Any] = field(default_factory=list)
    made: WeakSet[Any] = field(default_factory=WeakSet)

    def is_known(self, output: int) -> bool:
        return output in self.needed

    def value(self, output: int) -> Tensor:
        return self.values[output]

    def need(self, outputs: set[int]) -> None:
        self.needed += sorted(outputs)

    def backward(self, loss: Pending, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.trained.append((loss.node, args, kwargs))

    def returned(self) -> list[Pending]:
        return [
            pending(value.to("meta"), Output(self, number, value.dim()))
            for number, value in enumerate(self.values)
        ]


def call(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    made = [torch.randn(shape, requires_grad=True) for shape in ((ROWS, WIDTH), (ROWS,), ())]
    return Toy(made)


def assigned(a: Tensor, b: Tensor) -> Tensor:
    copy = a * 1
    copy[:, 0] = b
    return copy


def clipped_in_place(a: Tensor) -> Tensor:
    copy = a * 1
    F.relu(copy, inplace=True)
    return copy


def itself_written(a: Tensor) -> Tensor:
    copy = a * 1
    same = copy.contiguous()
    same += 1
    return copy + same


def view_written(a: Tensor, b: Tensor) -> Tensor:
    part = (a * 1)[:, 1:]
    part.mul_(3)
    part[1] = 0
    return part.sum(1) + b


FUNCTIONS = [
    lambda a, b, c: assigned(a, b),
    lambda a, b, c: assigned(a, b).sum() * c,
    lambda a, b, c: clipped_in_place(a),
    lambda a, b, c: itself_written(a),
    lambda a, b, c: view_written(a, b),
    lambda a, b, c: a * 2 + b[:, None],
    lambda a, b, c: torch.cat([a, a], 1)[:, 1:],
    lambda a, b, c: a.max(1).values + b,
    lambda a, b, c: a.max(1)[1].float(),
    lambda a, b, c: F.log_softmax(a, -1).mean() * c,
    lambda a, b, c: (a.t() @ a).sum() / 3,
    lambda a, b, c: a.clone().mul_(2).add_(b[:, None]),
    lambda a, b, c: sum(part.sum() for part in a.split(2)),
    lambda a, b, c: torch.stack([b, b * c]).norm(),
    lambda a, b, c: a[a[:, 0] > 0].sum(),  # as many rows as values say
    lambda a, b, c: F.cross_entropy(a, torch.tensor([0, 1, 2, 0])) + c,
    lambda a, b, c: 3 - b.detach() ** 2,
    lambda a, b, c: a.flatten().tolist(),
    lambda a, b, c: b.numpy(force=True).sum(),
    lambda a, b, c: a.shape[0] * c,
    lambda a, b, c: torch.where(b > 0, b, -b).topk(2).values,
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_what_is_read_later_is_what_it_is_at_once(number):
    toy, own = call(), call()
    found, expected = FUNCTIONS[number](*toy.returned()), FUNCTIONS[number](*own.values)
    if not isinstance(found, Pending):
        assert found == pytest.approx(expected) if not isinstance(found, Tensor) else True
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))
        assert toy.needed
        return
    assert toy.needed == []  # nothing was computed
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert calls_of(found.node) == {toy}
    value = real(found)
    torch.testing.assert_close(value, expected)
    assert value.requires_grad == expected.requires_grad
    if expected.requires_grad:
        cotangent = torch.randn_like(expected)
        of = [torch.autograd.grad(made, given, cotangent, allow_unused=True)
              for made, given in ((value, toy.values), (expected, own.values))]  # fmt: skip
        for mine, theirs in zip(*of, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_chains_of_functions_are_computed_once_each_from_what_they_need():
    for seed in range(40):
        draw = random.Random(seed)
        toy, own = call(seed), call(seed)
        pairs = list(zip(toy.returned(), own.values, strict=True))
        for _ in range(6):
            (mine, theirs), (other, others) = draw.choice(pairs), draw.choice(pairs)
            kind = draw.choice(["add", "tanh", "sum", "in place", "max"])
            if kind == "add" and theirs.dim() >= others.dim():
                shape = (-1, *(1,) * (theirs.dim() - 1)) if others.dim() == 1 else others.shape
                pairs.append((mine + other.reshape(shape), theirs + others.reshape(shape)))
            elif kind == "sum":
                pairs.append((mine.sum(), theirs.sum()))
            elif kind == "in place":
                copy, copied = mine * 1, theirs * 1
                before, was = copy + 1, copied + 1  # of the value before
                copy.mul_(3)
                copied.mul_(3)
                pairs += [(copy, copied), (before, was)]
            elif kind == "max" and theirs.dim() == 2:
                pairs.append((mine.max(1).values, theirs.max(1).values))
            else:
                pairs.append((torch.tanh(mine), torch.tanh(theirs)))
        assert toy.needed == []
        found, expected = pairs[-1]
        torch.testing.assert_close(real(found), expected)
        assert set(toy.needed) == {output.number for output in outputs_of(found.node)}
        for found, expected in pairs:
            torch.testing.assert_close(real(found), expected)
            assert real(found) is real(found)


WRITES = [
    lambda a, b: (a, a.view(-1)),
    lambda a, b: (a[:, 0], a),
    lambda a, b: (a.detach(), a),
    lambda a, b: (a.data, a[1]),
    lambda a, b: (a.cpu(), a),  # (which is itself where that is the CPU)
]
"""A tensor that is written into, and another in the same memory."""


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_another_in_the_memory_of_one_that_was_written_into_is_refused(number):
    rows, more, _ = call().returned()
    written, other = WRITES[number](rows * 1, more)
    written.zero_()
    assert other.shape == other.size()  # (this needs no value)
    with pytest.raises(PlanError, match="is used behind a write into another"):
        other + 1
    with pytest.raises(PlanError, match="is used behind a write into another"):
        other.tolist()
    assert real(written).eq(0).all()


def test_a_write_into_what_was_given_is_refused_when_that_is_computed():
    rows, _, _ = call().returned()
    other, kept = torch.ones(WIDTH), torch.ones(WIDTH)
    early, late, apart = rows * other, rows + other, rows * kept
    real(early)
    other.zero_()
    assert real(early).ne(0).all()
    assert real(apart).ne(0).all()
    with pytest.raises(PlanError, match=r"shape \[3\] is written into before"):
        real(late)
    labels = torch.tensor([0, 2, 1, 1])
    loss = F.cross_entropy(call().returned()[0], labels)
    labels.zero_()
    with pytest.raises(PlanError, match=r"shape \[4\] is written into before"):
        loss_of(loss.node, outputs(call()))


def test_a_write_into_values_is_refused_where_what_was_made_before_is_read():
    rows, _, _ = call().returned()
    copy = rows * 1
    before, read = copy.sum(), copy.mean()
    real(read)
    real(copy).detach().zero_()
    assert real(read).ne(0)
    with pytest.raises(PlanError, match="reads behind that what it had made of it before"):
        real(before)


def test_a_write_of_values_that_are_not_there_into_another_tensor_needs_them():
    toy = call()
    rows, more, _ = toy.returned()
    place = torch.zeros(ROWS, WIDTH)
    place[:, 0] = more
    assert toy.needed == [1]
    assert torch.equal(place[:, 0], toy.values[1])
    result = torch.zeros(ROWS, WIDTH)
    torch.mul(rows.detach(), 2, out=result)
    assert torch.equal(result, toy.values[0] * 2)


def test_what_changes_gradients_is_refused():
    rows, _, _ = call().returned()
    for change in (rows.retain_grad, lambda: rows.register_hook(lambda grad: 2 * grad)):
        with pytest.raises(PlanError, match="its gradient lies in the engine"):
            change()


def test_a_loss_of_what_trains_beside_the_model_is_refused():
    rows, _, _ = call().returned()
    scale = torch.ones((), requires_grad=True)
    loss = F.cross_entropy(rows * scale, torch.tensor([0, 2, 1, 1]))
    with pytest.raises(PlanError, match=r"shape \[\] beside the model that requires a gradient"):
        loss_of(loss.node, outputs(call()))


def test_outputs_in_one_memory_are_told():
    whole = torch.randn(ROWS, WIDTH)
    toy = Toy([whole, whole[:, 0], torch.randn(ROWS)])
    metas = [value.to("meta") for value in toy.values]
    metas[1] = metas[0][:, 0]
    first, column, apart = returned(
        (meta, Output(toy, number, meta.dim())) for number, meta in enumerate(metas)
    )
    first.mul_(2)
    assert (column.is_overwritten, apart.is_overwritten) == (True, False)


def test_what_is_told_of_a_tensor_needs_no_value():
    toy = call()
    rows, *_ = toy.returned()
    assert (rows.requires_grad, rows.is_meta, rows.is_leaf, rows.is_cuda) == (True, *[False] * 3)
    assert (rows.device, rows.grad, rows.dim(), len(rows)) == (toy.device, None, 2, ROWS)
    assert toy.needed == []
    toy.trains = False
    assert not (rows + 1).requires_grad


def test_a_backward_trains_on_the_call_and_on_one_alone():
    toy, other = call(0), call(1)
    loss, of_other = toy.returned()[2] / 2, other.returned()[2]
    loss.backward(retain_graph=True)
    ((node, args, kwargs),) = toy.trained
    assert (node, args, kwargs["retain_graph"]) == (loss.node, (), True)
    with pytest.raises(PlanError, match="a loss of 2 calls of the model has one backward"):
        (loss + of_other).backward()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def loss_of_rows(rows: Any, labels: Tensor, weight: float = 0.5) -> Any:
    return F.cross_entropy(rows, labels) + weight * rows.square().mean()


def outputs(toy: Toy, loss: int | None = None) -> Outputs:
    leaves, spec = tree_flatten(list(toy.values))
    return Outputs(tuple(leaves), spec, ("a", "b", "c"), (None,) * 3, loss)


def test_the_innermost_scalar_is_the_loss_and_what_is_behind_it_a_factor():
    toy = call()
    labels = torch.tensor([0, 2, 1, 1])
    loss = loss_of_rows(toy.returned()[0], labels)
    behind = (loss / 4 * 2.0) - 0.0
    found, own = loss_of(behind.node, outputs(toy)), loss_of(loss.node, outputs(toy))
    assert found.node is own.node is loss.node
    assert [target is labels for target in found.targets] == [True]
    single = toy.returned()[0].square().mean()
    assert loss_of((single / 2).node, outputs(toy)).node is single.node
    # One that the model returns itself has nothing that computes it.
    assert loss_of((toy.returned()[2] / 3).node, outputs(toy, loss=2)).node is None
    assert loss_of(toy.returned()[2].node, outputs(toy)).outputs == []


def test_losses_that_are_computed_alike_have_equal_signatures():
    labels, others = torch.tensor([0, 2, 1, 1]), torch.tensor([1, 1, 0, 2])

    def signature(labels: Tensor, weight: float = 0.5) -> Any:
        toy = call()
        return loss_of(loss_of_rows(toy.returned()[0], labels, weight).node, outputs(toy)).signature

    assert signature(labels) == signature(others)
    assert signature(labels) != signature(labels, 0.25)


def test_a_module_with_the_loss_computes_it_of_any_batch():
    torch.manual_seed(0)
    model, labels = Model(), torch.tensor([0, 2, 1, 1])
    x, toy = torch.randn(ROWS, WIDTH), call()
    loss = loss_of(loss_of_rows(toy.returned()[0], labels).node, outputs(toy))
    made = loss.trained(model, {"['x']": x, "['labels']": labels})
    assert dict(made.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for seed in range(3):
        torch.manual_seed(seed)
        rows, wanted = torch.randn(2, WIDTH), torch.randint(0, WIDTH, (2,))
        expected = loss_of_rows(model(rows), wanted)
        torch.testing.assert_close(made(rows, wanted), expected)

"""N1: a batch comes back as what it was, or is refused by the name of its entry."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import planner
from planner.capture import batch_from_spec, capture_module
from planner.errors import ModelError
from planner.language.graph.batch import (
    call_with_batch,
    difference,
    flatten_batch,
    tensor_paths,
    unflatten_batch,
)
from planner.language.graph.batch_classes import importable, name_of
from planner.language.lowering.defaults import default_plan
from planner.runtime.batches.samples import Collate

Sizes = collections.namedtuple("Sizes", "ids n")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    def doubled(self) -> torch.Tensor:
        return 2 * self.x


class Named(collections.UserDict):
    """A mapping whose entries are attributes, as tokenizers return it."""

    def __getattr__(self, name):
        return self.data[name]


class Tagged(dict):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


@dataclasses.dataclass
class Record:
    x: torch.Tensor


class Mode(enum.IntEnum):
    FAST = 1


X = torch.arange(6.0).view(3, 2)
JAGGED = torch.nested.nested_tensor([X, X], layout=torch.jagged)


@pytest.mark.parametrize(
    "batch",
    [
        Pair(X, X + 1),
        [Pair(X, X), {"deep": (Sizes(X, 3), None)}],
        {"a": collections.OrderedDict(x=X, k="text")},
        Named(x=X, y=(X, Pair(X, X))),
        {0: X, "b": {1: X}},
        collections.defaultdict(list, x=X),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_structure_survives_json(batch):
    leaves, tree = flatten_batch(batch)
    tree = json.loads(json.dumps(tree))
    assert tensor_paths(tree) == leaves.keys()

    def check(a, b):
        assert type(a) is type(b)
        if isinstance(a, collections.abc.Mapping):
            assert list(a) == list(b)
            a, b = list(a.values()), list(b.values())
        if isinstance(a, tuple | list):
            for one, other in zip(a, b, strict=True):
                check(one, other)
        else:
            assert a is b or a == b

    check(unflatten_batch(tree, leaves), batch)


def test_tokenizers_batches_stay_what_they_are():
    transformers = pytest.importorskip("transformers")
    batch = {"text": transformers.BatchEncoding({"input_ids": X})}
    leaves, tree = flatten_batch(batch)
    assert unflatten_batch(tree, leaves)["text"].input_ids is X


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": Record(X)}, "'a' is a Record; a dataclass is not taken apart: use a typing.NamedT"),
        ({"a": Tagged({"x": X}, 1)}, "'a' is a Tagged, a mapping that can't be made of its items"),
        ({"a": torch.return_types.max((X, X))}, "'a' is a max; a tuple of its own class"),
        ({"a": X.to_sparse()}, "'a' is a sparse_coo tensor, .* give x.to_dense"),
        (
            {"a": pack_sequence([X, X])},
            "'a' is a PackedSequence; its rows are those of all samples",
        ),
        ({"a": JAGGED}, "'a' is a nested tensor, .* a mask or lengths"),
        ({"a": [{"b": np.zeros(2)}]}, "'a.0.b' is a ndarray; use tensors .torch.from_numpy"),
        ({"a": Mode.FAST}, "'a' is a Mode; it would come back as a plain value"),
        ({"a": {X}}, "'a' is a set; a set has no order"),
        ({"a": {(1, 2): X}}, r"'a' has the key \(1, 2\), a tuple; use strings or whole numbers"),
        ({"a": {1: X, "1": X}}, "'a' has a number and its digits for keys"),
    ],
)
def test_what_no_structure_says_is_refused_by_name(batch, message):
    with pytest.raises(ModelError, match=message):
        flatten_batch(batch)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (lambda n: {"boxes": [{"b": X}] * n, "x": X}, "boxes is a list of 2 and of 3 entries"),
        (lambda n: {"n": n, "x": X}, "n is 2 and 3"),
        (lambda n: {"x": X, **({"m": X} if n > 2 else {})}, "batch has m in one of them alone"),
        (lambda n: {"p": (X, X) if n > 2 else Pair(X, X)}, "p is a .* and a tuple"),
    ],
)
def test_structures_that_differ_by_size_are_told_apart(sizes, told):
    with pytest.raises(ModelError, match=told):
        capture_module(nn.Identity(), sizes(2), sizes(3))
    assert not difference(*(flatten_batch(sizes(2))[1] for _ in range(2)))


class Reads(nn.Module):
    """Reads fields and a method of a namedtuple."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, pair: Pair, more: Named) -> torch.Tensor:
        assert type(pair) is Pair
        return self.fc(pair.doubled() + more.shift)


def reads(size: int):
    x, y, shift = torch.randn(3, size, 2, generator=torch.Generator().manual_seed(1)).double()
    return Pair(x, y), Named(shift=shift)


def loss(output: torch.Tensor, batch) -> torch.Tensor:
    return F.mse_loss(output, batch[0].y)


def test_a_model_trains_on_a_namedtuple_and_a_mapping():
    """Loss and loss weight, too, are given the user's own classes, part by part."""
    model = Reads().double()
    graph = capture_module(model, reads(2), reads(3), loss=loss)
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    two = batch_from_spec(plan.model.inputs, plan.model.batch_tree, 2)
    assert [type(each) for each in two] == [Pair, Named]
    batch = reads(4)
    expected = loss(model(*batch), batch).detach()
    seen = []

    def count(part):
        seen.append([type(each) for each in part])
        return len(part[0].x)

    engine = planner.apply(plan, model, loss=loss, loss_weight=count)
    torch.testing.assert_close(engine.step(batch), expected)
    assert seen == [[Pair, Named]] * 2


def test_a_loader_keeps_the_class():
    samples = [Pair(X[:n], X) for n in (1, 2)]
    made = Collate(make=None, reads=frozenset({"x"}), pad={"x": 0.0})(samples).batch
    assert type(made) is Pair
    assert made.x.shape == (2, 2, 2)
    assert made.y is None


def test_a_class_that_no_other_process_finds_is_refused():
    local = collections.namedtuple("Local", "x")
    assert importable(name_of(local)) is None
    assert importable(name_of(Pair)) is Pair
    with pytest.raises(ModelError, match=r"batch entry '0' .*Local, which other processes can't"):
        capture_module(nn.Identity(), (local(X[:2]),), (local(X),))
    tree = {"made": ["elsewhere.py:Pair", [["x", {"tensor": "x"}]]]}
    with pytest.raises(ModelError, match=r"a elsewhere.py:Pair of x, which this process can't imp"):
        unflatten_batch(tree, {"x": X})


class _Taking(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        return x.sum() if y is None else (x * y).sum()


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (
            {"x": 1, "labels": 2},
            "takes x, y; the batch has 'x', 'labels', 'labels' not among these",
        ),
        ({"y": 1}, "takes x, y; the batch has 'y', without 'x'"),
        ((1, 2, 3), "the batch has 3 entries, .* takes x, y; give as many"),
        ((), "the batch has 0 entries"),
    ],
)
def test_a_batch_of_other_arguments_is_told_with_what_forward_takes(batch, told):
    with pytest.raises(ModelError, match=told) as refused:
        call_with_batch(_Taking(), batch)
    assert "\n" not in str(refused.value)


def test_a_wrong_call_inside_of_forward_is_not_the_batchs():
    class Inner(nn.Module):
        def forward(self, x):
            return _Taking()(z=x)

    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        call_with_batch(Inner(), {"x": torch.ones(2)})


def test_what_a_wrapper_of_forward_takes_is_taken():
    """An old name of an argument, as transformers' `deprecate_kwarg` has it."""

    class Wrapped(_Taking):
        @functools.wraps(_Taking.forward)
        def forward(self, old):
            return _Taking.forward(self, old)

    assert call_with_batch(Wrapped(), {"old": torch.ones(2)}) == 2


def test_the_capture_of_such_a_batch_ends_in_that_line():
    batches = [{"x": torch.ones(n, 4), "labels": torch.ones(n)} for n in (2, 3)]
    with pytest.raises(ModelError, match="a dict batch is given by keyword"):
        capture_module(_Taking(), *batches)

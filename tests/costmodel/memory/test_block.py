"""One block's bytes: saved, recomputed and deferred, with hand arithmetic where there is any."""

import pytest
import torch
from torch import nn

from costmodel.memory.block.backward_facts import backward_facts
from costmodel.memory.block.backward_walk import backward_walk
from costmodel.memory.block.block_bytes import block_bytes, block_load
from costmodel.memory.block.deferred_weights import (
    DeferredWeight,
    deferred_storages,
    weight_job,
)
from costmodel.memory.block.forward_walk import forward_walk
from costmodel.memory.block.recomputed import kept_storages
from costmodel.memory.saved import saved_tensors
from planner.language.ops.recompute_choice import ops_made_again
from planner.language.ops.record import packet_of
from planner.language.ops.weight_products import deferrable_products
from tests.builders import tiny_models
from tests.captures import capture_module


@pytest.fixture(scope="module")
def layer():
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    return max(graph.classes, key=lambda c: len(c.ops)).bind(2)


def test_recomputation_keeps_less_and_runs_again(layer):
    """Full recomputation keeps block inputs only; selective some results; none what ops save."""
    recomputed = ops_made_again(layer, layer, None)
    none, some, full = (
        block_bytes(layer, device_type="cpu", recompute=choice, recomputed=recomputed)
        for choice in ("none", "selective", "full")
    )
    assert full.kept_bytes == 0 < some.kept_bytes < none.kept_bytes
    assert none.recomputed_bytes == none.recompute_rise_bytes == 0
    assert 0 < some.recomputed_bytes < full.recomputed_bytes
    assert full.recompute_rise_bytes >= full.recomputed_bytes
    assert all(edge.is_kept for edge in full.inputs if edge.requires_grad)
    saved = saved_tensors(layer, device_type="cpu")
    kept = kept_storages(saved, recomputed)
    load = block_load(none, recomputed)
    kept_bytes = sum(kept.roots.values()) + sum(kept.extra.values())
    assert load.selective_bytes == load.input_bytes + kept_bytes < load.saved_bytes
    assert kept.results <= kept.roots.keys()


def test_every_choice_of_recomputation_is_a_set_of_ops_that_run_again(layer):
    """No op: all that autograd saves, inputs apart. All ops: nothing."""
    saved = saved_tensors(layer, device_type="cpu")
    inputs_bytes = sum(saved.roots[name] for name in saved.inputs)
    assert kept_storages(saved, ()).num_bytes == saved.num_bytes - inputs_bytes
    assert kept_storages(saved, [op.name for op in layer.ops]).num_bytes == 0


def test_a_forward_is_as_high_as_what_it_makes_while_it_is_read(layer):
    """Values go after their last reader: keeping all of them is higher, keeping none is lower."""
    saved = saved_tensors(layer, device_type="cpu")
    every = {s.root for s in saved.storages.storage.values()}
    none, some, all_kept = (
        forward_walk(saved, roots=roots, extra={}) for roots in ((), saved.roots, every)
    )
    made = sum(s.num_bytes for s in {*saved.storages.storage.values()} if s.kind == "activation")
    assert 0 < none < some < all_kept
    assert all_kept <= made + 1000, "and the scratch of a kernel"


def test_the_first_backward_makes_the_gradients_that_stay(layer):
    saved = saved_tensors(layer, device_type="cpu")
    facts = backward_facts(saved, deferrable_products(layer))
    first = backward_walk(facts, first=True)
    later = backward_walk(facts, first=False)
    trained = {name for name in layer.params if layer.tensor[name].requires_grad}
    assert first.made == later.made == trained
    assert first.rise_bytes >= later.rise_bytes
    # Gradients stay to the end: with sums this wide, the end is the highest point.
    wide = backward_walk(facts, first=True, gradient_factor=100)
    trained_bytes = sum(layer.tensor[name].bytes_at(1) for name in trained)
    assert wide.rise_bytes > 90 * trained_bytes > first.rise_bytes


def test_deferred_weight_gradients_wait_with_their_operands(layer):
    saved = saved_tensors(layer, device_type="cpu")
    products = deferrable_products(layer)
    facts = backward_facts(saved, products)
    split = backward_walk(facts, first=True, split=True)
    assert len(split.deferred) == len(products) > 0
    weights = {ref.name for _, ref, *_ in products.values()}
    assert not weights & split.made
    waiting = deferred_storages(split.deferred)
    assert all(size > 0 for size in waiting.values())


def weight(name, *held, adds=True):
    return DeferredWeight(
        held=held, weight_bytes=100, bias_bytes=10, adds=adds, whole_bytes=300, weight=name
    )


def test_a_weight_job_by_hand():
    """Two products of one input x (8 bytes): the last deferred first; x is freed by the other."""
    pair = [weight("a", ("x", 8), ("grad a", 4)), weight("b", ("x", 8), ("grad b", 4))]
    # First microbatch: b makes 110 bytes that stay and frees its 4; then a makes 110 more.
    assert weight_job(pair, first=True, gradient_factor=1) == (110 - 4 + 110, 220)
    # Later: weights add in place (beta = 1), only a bias gradient of 10 is made beside.
    assert weight_job(pair, first=False, gradient_factor=1) == (10, 0)
    # In bf16 a gradient of 110 is made and added to sums of fp32, of which nothing stays later.
    assert weight_job(pair, first=False, gradient_factor=2) == (110, 0)


def test_the_gradient_of_a_view_is_made_whole():
    """A product with a view of a weight makes 300 of the whole weight, and adds that."""
    view = [weight("a", adds=False)]
    assert weight_job(view, first=False, gradient_factor=1) == (310 + 300, 0)


class OnlyEntries(nn.Module):
    """Takes the only entry of a dim out of a tensor that was permuted before."""

    def __init__(self, take):
        super().__init__()
        self.layer, self.take = nn.Linear(8, 8), take

    def forward(self, x):
        return self.take(self.layer(x).unsqueeze(1).transpose(1, 2)).pow(2).mean()


@pytest.mark.parametrize(
    "take", [lambda y: y.unbind(2)[0], lambda y: y.select(2, 0)], ids=["unbind", "select"]
)
def test_the_gradient_of_the_only_entry_of_a_dim_is_copied_into_it(take):
    """Its backward stacks, and hands no view on, whose strides would be of another dim less."""
    graph = capture_module(OnlyEntries(take), torch.ones(2, 4, 8), torch.ones(3, 4, 8))
    program = next(c for c in graph.classes if any("transpose" in op.target for op in c.ops))
    program = program.bind(2)
    facts = backward_facts(saved_tensors(program, device_type="cpu"), {})
    (step,) = [each for each in facts.ops if packet_of(each.op.target) in ("unbind", "select")]
    assert [each.is_same for each in step.gradients] == [False]
    assert len(backward_walk(facts, first=True).made) == 2, "of the weight and the bias"

"""Users' own programs with experts: the forms that are told, and near misses that are not."""

from __future__ import annotations

from itertools import product as pairs
from random import Random

import pytest
import torch
from torch.nn import functional as F

from tests.capture.routing.dealing import (
    BACK,
    CHOSEN,
    COUNTS,
    EXPERTS,
    LAYERS,
    ORDERS,
    TAKEN,
    WIDTH,
    Dealt,
    batch_of,
    by_inverse,
    by_row,
    by_sort,
    captured,
    check_bits,
    inside_of,
    product,
    sorts_left,
    told_ops,
)

pytest.importorskip("transformers")


def build(dtype=torch.float32, **ways):
    torch.manual_seed(0)
    return Dealt(**ways).to(dtype)


FORMS = [
    *({"order": way} for way in ORDERS.values()),
    *({"counts": way} for way in COUNTS.values()),
    *({"taken": way} for way in TAKEN.values()),
    *({"back": way} for way in BACK.values()),
    {"biased": True},
]


def _id_of(form):
    ((step, way),) = form.items()
    return f"{step}-{getattr(way, '__name__', way)}"


@pytest.mark.parametrize("form", FORMS, ids=[_id_of(form) for form in FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_form_is_told_with_the_bits_it_had(form, dtype):
    check_told(build(dtype, **form), dtype, biased="biased" in form)


@pytest.mark.parametrize("seed", range(6))
def test_forms_are_told_together(seed):
    """Any order with any counts, and so on."""
    random = Random(seed)
    form = {
        "order": random.choice([*ORDERS.values()]),
        "counts": random.choice([*COUNTS.values()]),
        "taken": random.choice([*TAKEN.values()]),
        "back": random.choice([*BACK.values()]),
        "biased": random.random() < 0.5,
    }
    dtype = random.choice([torch.float32, torch.bfloat16])
    check_told(build(dtype, **form), dtype, biased=form["biased"])


def check_told(module, dtype, *, biased=False):
    def batch(size):
        return batch_of(size, dtype)

    graph = captured(module, batch)
    assert told_ops(graph) == {"sort": LAYERS, "bias": LAYERS * biased, "unsort": LAYERS}
    assert sorts_left(graph) == 0
    check_bits(module, graph, batch)


def test_a_row_alone_may_be_computed_on_between():
    """A norm, a dropout of nothing, a slice of columns: each is of a row alone."""

    def inside(layer, rows, sorted_ids, ends, order):
        made = product(F.layer_norm(rows, (WIDTH,)), layer.first, ends)
        gate, up = made.chunk(2, -1)
        made = torch.cat([F.softmax(gate, -1) * up, up.clamp(max=1.0)], -1)
        return product(made, layer.last, ends)

    check_told(build(inside=inside), torch.float32)


def test_copies_that_are_put_back_may_be_used_as_one_likes():
    """Where they are not summed as is known, they are put back as copies of themselves."""

    def back(made, order, weights):
        copies = made[torch.argsort(order)].view(-1, CHOSEN, WIDTH)
        return torch.einsum("rkh,rk->rh", copies.tanh(), weights)

    check_told(build(back=back), torch.float32)


# ------------------------------------------------------------------------------ near misses


def _counts_of_others(ids, sorted_ids):
    return F.one_hot((ids + 1) % EXPERTS, EXPERTS).sum(dim=(0, 1))


def _counts_in_too_few_bins(ids, sorted_ids):
    return torch.histc(sorted_ids.float(), bins=EXPERTS, min=0, max=EXPERTS)


def _order_twice(x, order):
    return by_row(x, order[order])


def _descending(ids):
    return torch.sort(ids.reshape(-1), descending=True)


def _clamped(layer, rows, sorted_ids, ends, order):
    return inside_of(layer, rows, sorted_ids.clamp(max=EXPERTS - 2), ends, order)


def _places_as_values(layer, rows, sorted_ids, ends, order):
    """Where a row was becomes a number of the model."""
    return inside_of(layer, rows + 0.01 * order.unsqueeze(-1), sorted_ids, ends, order)


def _running_sums(layer, rows, sorted_ids, ends, order):
    return inside_of(layer, rows.cumsum(0) / 8, sorted_ids, ends, order)


def _places_in_the_order(layer, rows, sorted_ids, ends, order):
    """What is added depends on where a row lies, not on which it is."""
    return inside_of(layer, rows + 0.01 * torch.arange(len(rows))[:, None], sorted_ids, ends, order)


def _other_copies(made, order, weights):
    """Copies go back in the order of the order: rows of others."""
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    return made[order].view(-1, CHOSEN, WIDTH).sum(1)


def _weights_of_others(made, order, weights):
    made = made * weights.reshape(-1)[torch.argsort(order)].unsqueeze(-1)
    back = made[torch.argsort(order)]
    return back.view(-1, CHOSEN, WIDTH).sum(1)


def _last_copy_stays(made, order, weights):
    total = torch.zeros(len(weights), WIDTH, dtype=made.dtype)
    return total.index_put((order // CHOSEN,), made)


def _added_to_others(made, order, weights):
    total = torch.ones(len(weights), WIDTH, dtype=made.dtype)
    return total.index_add(0, order // CHOSEN, made)


def _ends_shifted(counts):
    return (counts.cumsum(0) - 0).to(torch.int32)


def _sorted_places_kept(layer, rows, sorted_ids, ends, order):
    """The experts' numbers in the new order weigh rows."""
    return inside_of(layer, rows * (1 + sorted_ids).unsqueeze(-1), sorted_ids, ends, order)


MISSES = {
    "counts of another tensor": {"counts": _counts_of_others},
    "counts in other bins": {"counts": _counts_in_too_few_bins},
    "order applied twice": {"taken": _order_twice},
    "descending": {"order": _descending},
    "clamped experts": {"inside": _clamped, "biased": True},
    "places as values": {"inside": _places_as_values},
    "running sums": {"inside": _running_sums},
    "places in the order": {"inside": _places_in_the_order},
    "other copies": {"back": _other_copies},
    "weights of others": {"back": _weights_of_others},
    "last copy stays": {"back": _last_copy_stays},
    "added to others": {"back": _added_to_others},
    "ends computed on": {"ends": _ends_shifted},
    "experts as values": {"inside": _sorted_places_kept},
}


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_is_not_told_and_computes_what_it_did(name):
    module = build(**MISSES[name])
    graph = captured(module)
    assert told_ops(graph) == {"sort": 0, "bias": 0, "unsort": 0}
    assert sorts_left(graph) > 0
    check_bits(module, graph)


@pytest.mark.parametrize(("miss", "seed"), [*pairs(MISSES, range(2))])
@pytest.mark.slow
def test_a_near_miss_among_other_forms_is_not_told(miss, seed):
    random = Random(f"{miss}{seed}")
    others = {
        "order": random.choice([*ORDERS.values()]),
        "counts": random.choice([*COUNTS.values()]),
        "taken": random.choice([*TAKEN.values()]),
        "back": random.choice([*BACK.values()]),
    }
    module = build(**others | MISSES[miss])
    graph = captured(module)
    assert told_ops(graph)["sort"] == 0
    check_bits(module, graph)


def test_rows_past_a_capacity_are_not_told():
    """A part of the order: some copies are dropped."""

    def taken(x, order):
        return by_row(x, order[: 3 * len(x) // 2])

    def inside(layer, rows, sorted_ids, ends, order):
        ends = ends.clamp(max=len(rows))
        made = inside_of(layer, rows, sorted_ids, ends, order)
        return torch.cat([made, made.new_zeros(len(order) - len(made), WIDTH)])

    module = build(taken=taken, inside=inside, order=by_sort, back=by_inverse)
    graph = captured(module)
    assert told_ops(graph)["sort"] == 0
    check_bits(module, graph)


def test_detached_weights_stay_without_a_gradient():
    """Rows are told with the weights that were put on them, not with those behind a detach."""

    def back(made, order, weights):
        return by_inverse(made, order, weights.detach())

    check_told(build(back=back), torch.float32)


def _sorted_weights_detached(made, order, weights):
    made = made * weights.reshape(-1)[order].detach().unsqueeze(-1)
    return made[torch.argsort(order)].view(-1, CHOSEN, WIDTH).sum(1)


def _copies_detached(made, order, weights):
    back = made[torch.argsort(order)].detach().view(-1, CHOSEN, WIDTH)
    return (back * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("back", [_sorted_weights_detached, _copies_detached])
def test_what_is_detached_on_its_way_back_has_no_gradient(back):
    module = build(back=back)
    check_bits(module, captured(module))

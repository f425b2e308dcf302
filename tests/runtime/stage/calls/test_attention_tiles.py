"""Attention by tiles and by kernels: what PyTorch computes with a mask for each pair, in fp64."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch
from torch.nn import functional as F

from planner.runtime.stage.calls import attention_kernels, attention_tiles
from planner.runtime.stage.calls.attention_kernels import by_blocks, causal_by_pieces
from planner.runtime.stage.calls.attention_tiles import Sight, attention_by_tiles

KEYS = 12


def whole_mask(sight, same, keys, queries):
    """The mask that tiles do without, [b, 1, queries, keys]."""
    place = sight.positions(queries, torch.device("cpu"))[:, None]
    at = torch.arange(KEYS)
    mask = torch.ones(2, 1, queries, KEYS, dtype=torch.bool)
    if sight.low is not None:
        mask = mask & (place - at >= sight.low)
    if sight.high is not None:
        mask = mask & (place - at <= sight.high)
    if sight.chunk is not None:
        mask = mask & (place // sight.chunk == at // sight.chunk)
    if same is not None:
        mask = mask & (same[:, place[:, 0]][:, None, :, None] == same[:, None, None])
    return mask if keys is None else mask & keys[:, None, None]


def drawn(queries, width=6):
    """Queries of 4 heads, keys and values of 2."""
    shapes = ((2, 4, queries, 4), (2, 2, KEYS, 4), (2, 2, KEYS, width))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def by_mask(query, key, value, mask):
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)


BOUNDS = list(itertools.product((None, 0, -2), (None, 3), (None, 5)))
CUTS = [(1, 1, False), (2, 1, False), (1, 2, False), (2, 3, False), (2, 3, True)]


@pytest.mark.parametrize("tile", [3, 512])
@pytest.mark.parametrize(("segments", "ranks", "mirrored"), CUTS)
def test_tiles_have_the_result_and_gradients_of_the_whole(
    monkeypatch, tile, segments, ranks, mirrored
):
    """N9: bounds, chunks, documents and padding; whole sequences, and pieces of ranks."""
    monkeypatch.setattr(attention_tiles, "TILE", tile)
    torch.manual_seed(0)
    same = torch.randint(0, 3, (2, KEYS)).sort(-1)[0]
    keys = torch.rand(2, KEYS) > 0.5
    tables = itertools.product((None, same), (None, keys))
    for (low, high, chunk), (documents, counts) in itertools.product(BOUNDS, tables):
        sight = Sight(low, high, chunk, segments, ranks, ranks - 1, mirrored=mirrored)
        query, key, value = drawn(KEYS // ranks)
        mask = whole_mask(sight, documents, counts, KEYS // ranks)
        wanted = by_mask(query, key, value, mask)
        found = attention_by_tiles(query, key, value, documents, counts, 0.3, sight)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        above = torch.randn_like(wanted)
        grads = [torch.autograd.grad(y, (query, key, value), above) for y in (found, wanted)]
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_tiles_between_documents_are_left_out(monkeypatch):
    """B12: of causal attention to 12 places by tiles of 3 there are 10 a sample; two documents of 6
    leave 6, one document all of them, in the forward and in the backward.
    """
    monkeypatch.setattr(attention_tiles, "TILE", 3)
    made: list[int] = []
    scores = attention_tiles.Work.scores

    def counted(work, *args):
        made.append(1)
        return scores(work, *args)

    monkeypatch.setattr(attention_tiles.Work, "scores", counted)
    sight = Sight(0, None, None, 1, 1, 0)
    two, one = torch.arange(KEYS) // 6, torch.zeros(KEYS, dtype=torch.int64)
    for first, second, tiles in ((two, two, 12), (two, one, 16), (one, one, 20), (-two, two, 12)):
        attention_by_tiles(
            *drawn(KEYS), torch.stack([first, second]), None, 0.3, sight
        ).sum().backward()
        assert len(made) == 2 * tiles
        made.clear()


def test_half_precision_is_summed_in_single():
    """N9: as fused kernels do."""
    query, key, value = (each.detach().bfloat16() for each in drawn(KEYS))
    sight = Sight(0, 3, None, 1, 1, 0)
    found = attention_by_tiles(query, key, value, None, None, 0.3, sight)
    assert found.dtype == torch.bfloat16
    wide = [each.double() for each in (query, key, value)]
    wanted = by_mask(*wide, whole_mask(sight, None, None, KEYS))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("segments", "ranks", "mirrored"), CUTS)
def test_kernels_of_gpus_are_told_the_same(segments, ranks, mirrored):
    """N9: what a flash kernel and `flex_attention` are told, computed here without a GPU. Their
    backward needs one.
    """
    torch.manual_seed(0)
    same = torch.randint(0, 3, (2, KEYS)).sort(-1)[0]
    keys = torch.rand(2, KEYS) > 0.5
    query, key, value = (each.detach() for each in drawn(KEYS // ranks, width=4))
    for low, high, chunk in ((0, 3, None), (-2, None, 5)):
        sight = Sight(low, high, chunk, segments, ranks, 0, mirrored=mirrored)
        mask = whole_mask(sight, same, keys, KEYS // ranks)
        found = by_blocks(query, key, value, same, keys, 0.3, sight)
        torch.testing.assert_close(found, by_mask(query, key, value, mask))
    causal = Sight(0, None, None, segments, ranks, 0, mirrored=mirrored)
    mask = whole_mask(causal, None, None, KEYS // ranks)
    found = causal_by_pieces(query, key, value, 0.3, causal)
    torch.testing.assert_close(found, by_mask(query, key, value, mask))


def test_layers_share_a_mask_of_blocks(monkeypatch):
    """It is made anew for other tables, and for tables that were written to."""
    made: list[object] = []
    monkeypatch.setattr(attention_kernels, "_blocks", lambda *given: made.append(given) or made)
    monkeypatch.setattr(attention_kernels, "_kept", OrderedDict())
    sight, device = Sight(0, None, None, 1, 1, 0), torch.device("cpu")

    def masks(same: torch.Tensor | None, keys: torch.Tensor | None) -> int:
        for _ in range(3):  # layers
            attention_kernels._shared_blocks(sight, 8, 8, device, same, keys)
        return len(made)

    documents, padding = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.bool)
    assert masks(documents, None) == 1
    assert masks(documents, padding) == 2
    assert masks(documents.clone(), None) == 3
    padding[0, 7] = False
    assert masks(documents, padding) == 4
    for _ in range(20):  # microbatches
        masks(documents.clone(), None)
    assert len(attention_kernels._kept) == 8
    # What follows from sizes alone is used by each microbatch, and stays.
    before = masks(None, None)
    for _ in range(20):
        assert masks(documents.clone(), None) == masks(None, None)
    assert len(made) == before + 20

"""flex_attention is written out: it computes what torch's does, and masks are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
)

from planner.capture import capture_module
from planner.capture.flex import flex_written_out
from planner.errors import CaptureError
from planner.language.ops.families.products.masked_attention import MASKED
from tests.constructs import flex_on_cpu

LENGTH, HEADS = 6, 2


def causal(b, h, q, k):
    return q >= k


def windowed_by_head(b, h, q, k):
    return (q - k).abs() <= h + 1


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
TABLE = torch.randn(HEADS, 2 * LENGTH, dtype=torch.float64, requires_grad=True)


def of_documents(b, h, q, k):
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def sees_nothing_at_first(b, h, q, k):
    return q > k


CASES = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"mask": causal},
    "by head, of documents": {"mask": and_masks(windowed_by_head, of_documents)},
    "a query without a key": {"mask": sees_nothing_at_first},
    "slopes": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()},
    "table": {"score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH], "mask": causal},
    "soft cap": {"score_mod": lambda s, b, h, q, k: 2 * torch.tanh(s / 2), "mask": of_documents},
    "mask in scores": {"score_mod": lambda s, b, h, q, k: torch.where(q > k, s, -torch.inf)},
    "grouped": {"mask": causal, "kv_heads": 1, "enable_gqa": True},
    "grouped, with scores": {
        "score_mod": lambda s, b, h, q, k: s * (h + 1),
        "kv_heads": 1,
        "enable_gqa": True,
    },
    "more": {"mask": sees_nothing_at_first, "return_aux": AuxRequest(lse=True)},
}


def attended(score_mod=None, mask=None, kv_heads=HEADS, **options) -> list[Tensor]:
    """Results and gradients of one call."""
    torch.manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads)
    given = [torch.randn(2, n, LENGTH, 4, dtype=torch.float64, requires_grad=True) for n in heads]
    if mask is not None:
        mask = create_block_mask(mask, 2, HEADS, LENGTH, LENGTH, device="cpu")
    made = flex_attention(*given, score_mod=score_mod, block_mask=mask, **options)
    made = [made] if isinstance(made, Tensor) else [made[0], made[1].lse]
    # (Uncompiled, torch's own has no gradient for what a function reads beside scores.)
    return [*made, *torch.autograd.grad((made[0] ** 3).sum(), given)]


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_out_is_what_torch_computes(case):
    with flex_on_cpu():
        expected = attended(**CASES[case])
    with flex_written_out():
        found = attended(**CASES[case])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", ["slopes", "table"])
def test_what_a_function_of_scores_reads_is_trained(case):
    """As biases of attention written by hand are."""
    apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    bias = -SLOPES[:, None, None] * apart.abs() if case == "slopes" else TABLE[:, apart + LENGTH]
    if case == "table":
        bias = bias.masked_fill(apart < 0, -torch.inf)
    given = [torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*given, attn_mask=bias.expand(2, -1, -1, -1))
    options = dict(CASES[case])
    with flex_written_out():
        if mask := options.pop("mask", None):
            options["block_mask"] = create_block_mask(mask, None, None, LENGTH, LENGTH)
        found = flex_attention(*given, **options)
    learnt = SLOPES if case == "slopes" else TABLE
    mine, theirs = (torch.autograd.grad((y**3).sum(), learnt)[0] for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_torchs_functions_are_put_back():
    before = flex_attention.__code__
    with flex_written_out():
        assert flex_attention.__code__ is not before
    assert flex_attention.__code__ is before


class Model(nn.Module):
    """Attention of the test's choice."""

    def __init__(self, make, kept: BlockMask | None = None) -> None:
        super().__init__()
        self.mix, self.make, self.kept = nn.Linear(4, 12), make, kept

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, 2)).transpose(1, 2) for part in self.mix(x).chunk(3, -1)
        )
        return self.make(self, query, key, value, documents).square().mean()


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, LENGTH, 4), "documents": torch.zeros(size, LENGTH).long()}


def captured(make, **options):
    graph = capture_module(Model(make, **options), batch(2), batch(3))
    return [op.target for program in graph.classes for op in program.ops]


def masked_by(mask_mod, num_samples=len, **options):
    def make(self, query, key, value, documents):
        mask = create_block_mask(
            lambda *index: mask_mod(documents, *index),
            num_samples(query),
            None,
            LENGTH,
            LENGTH,
            device=query.device,
        )
        return flex_attention(query, key, value, block_mask=mask, **options)

    return make


def test_masks_are_told():
    """By documents a kernel for masks; causal alone the flag that attention has."""
    both = captured(
        masked_by(lambda documents, b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]))
    )
    assert MASKED in both
    plain = captured(
        masked_by(lambda documents, b, h, q, k: q >= k, num_samples=lambda query: None)
    )
    assert "aten.scaled_dot_product_attention.default" in plain
    assert not any("aten.ge" in target or "aten.where" in target for target in plain)


def test_a_compiled_attention_and_a_mask_of_before():
    kept = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    compiled = torch.compile(flex_attention, backend="eager")

    def make(self, query, key, value, documents):
        return compiled(query, key, value, block_mask=self.kept)

    assert "aten.scaled_dot_product_attention.default" in captured(make, kept=kept)


def sliced(self, query, key, value, documents):
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device=query.device)
    return flex_attention(query, key, value, block_mask=mask[:, :, 0])


def too_short(self, query, key, value, documents):
    mask = create_block_mask(causal, None, None, LENGTH - 1, LENGTH, device=query.device)
    return flex_attention(query, key, value, block_mask=mask)


def of_blocks(self, query, key, value, documents):
    return flex_attention(query, key, value, block_mask=self.kept)


def indexed_twice(self, query, key, value, documents):
    return flex_attention(
        query, key, value, score_mod=lambda s, b, h, q, k: s + documents[b][q].float()
    )


def three_dims(self, query, key, value, documents):
    return flex_attention(query[:, 0], key[:, 0], value[:, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            masked_by(lambda d, b, h, q, k: d[b, q] == d[b, k], num_samples=lambda query: None),
            "is given B=None and a mask_mod that reads its sample; give it the number of them",
        ),
        (
            masked_by(lambda d, b, h, q, k: h < q),
            "is given H=None and a mask_mod that reads its head; give it the number of them",
        ),
        (sliced, "takes a BlockMask apart.*create_block_mask"),
        (too_short, r"a mask of \(5, 6\) queries and keys for 6 and 6"),
        (of_blocks, "a BlockMask of blocks alone.*by create_block_mask from a mask_mod"),
        (indexed_twice, r"indexes a tensor twice in a row.*write x\[b, q\]"),
        (three_dims, "takes queries, keys and values of 4 dims; they have 3, 3 and 3"),
    ],
)
def test_what_cannot_be_written_out_is_refused(make, message):
    blocks = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    kept = BlockMask.from_kv_blocks(*blocks, seq_lengths=(LENGTH, LENGTH))
    assert kept.mask_mod is noop_mask
    with pytest.raises(CaptureError, match=message) as caught:
        captured(make, kept=kept)
    assert "test_flex.py" in str(caught.value), "the user's line"
    assert "\n" not in str(caught.value)

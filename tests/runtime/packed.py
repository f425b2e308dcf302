"""Packed documents: a small model that attends inside them alone, and batches of uneven work."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PLACES, WIDTH, TOKENS = 64, 8, 16


class Packed(nn.Module):
    """Two layers of causal attention inside documents that are numbered, and a token's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def hidden(self, ids: Tensor, documents: Tensor) -> Tensor:
        at = torch.arange(PLACES)
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (
            at[:, None] >= at[None, :]
        )
        x = self.embed(ids)
        for layer in self.layers:
            query, key, value = (
                each.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
                for each in layer(x).chunk(3, -1)
            )
            made = F.scaled_dot_product_attention(query, key, value, mask)
            x = x + made.transpose(1, 2).flatten(2)
        return self.norm(x)

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids, documents))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Numbering(Packed):
    """Each of its layers numbers the documents itself, by the places where they begin."""

    def hidden(self, ids: Tensor, documents: Tensor) -> Tensor:
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0)).long()
        x, at = self.embed(ids), torch.arange(PLACES)
        for layer in self.layers:
            numbers = begins.cumsum(-1)
            same = numbers[:, None, :, None] == numbers[:, None, None, :]
            query, key, value = (
                each.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
                for each in layer(x).chunk(3, -1)
            )
            mask = same & (at[:, None] >= at[None, :])
            made = F.scaled_dot_product_attention(query, key, value, mask)
            x = x + made.transpose(1, 2).flatten(2)
        return self.norm(x)


class Ordered(Packed):
    """Its loss weighs a sample by its place in the batch."""

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids, documents))
        by_token = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
        weight = torch.arange(1, len(ids) + 1) / len(ids)
        return (by_token.mean(1) * weight).mean()


class Normed(Packed):
    """It normalises by statistics of the samples that it sees together."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch = nn.BatchNorm1d(WIDTH)

    def hidden(self, ids: Tensor, documents: Tensor) -> Tensor:
        return self.by_batch(super().hidden(ids, documents).mT).mT


def batch_of(size: int) -> dict[str, Tensor]:
    """Half of the samples are a document each, most of them where microbatches and replicas begin,
    the others many of them, of other lengths; labels are ignored here and there.
    """
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, TOKENS, (size, PLACES), generator=generator)
    at = torch.arange(PLACES)
    length = torch.tensor([PLACES if i % 8 in (0, 1, 2, 4) else 1 + i % 3 for i in range(size)])
    labels = ids.roll(-1, 1)
    ignored = torch.rand(size, PLACES, generator=generator)
    labels[ignored < torch.linspace(0, 0.8, size)[:, None]] = -100
    labels[:, 0] = 1
    return {"ids": ids, "documents": at // length[:, None], "labels": labels}

"""A linear-chain CRF: the log likelihoods of sequences, divided by the number of their tokens.

Source: aphp/edsnlp#384 (and kmkurn/pytorch-crf#55): the mean over words had to be made fit for
several GPUs. Right: one process's.
"""

import torch
from torch import nn


class Chain(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))
        self.moves = nn.Parameter(torch.randn(tags, tags))

    def forward(self, scores, tags, mask):
        steps = scores.gather(-1, tags[..., None]).squeeze(-1)
        moved = self.moves[tags[:, :-1], tags[:, 1:]]
        last = tags.gather(1, mask.long().sum(1, keepdim=True) - 1).squeeze(1)
        path = self.start[tags[:, 0]] + steps[:, 0] + self.end[last]
        path = path + ((steps[:, 1:] + moved) * mask[:, 1:]).sum(1)
        alpha = self.start + scores[:, 0]
        for t in range(1, scores.shape[1]):
            following = (alpha[:, :, None] + self.moves).logsumexp(1) + scores[:, t]
            alpha = torch.where(mask[:, t, None] > 0, following, alpha)
        return (alpha + self.end).logsumexp(1) - path


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.chain = nn.Linear(8, 4), Chain(4)

    def forward(self, ids, tags, mask):
        x = self.token(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.chain(self.head(x), tags, mask).sum() / mask.sum()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 6, 2, 1, 5, 6, 1, 3])[:size]
    return {
        "ids": torch.randint(16, (size, 6), generator=g),
        "tags": torch.randint(4, (size, 6), generator=g),
        "mask": (torch.arange(6) < lengths[:, None]).double(),
    }

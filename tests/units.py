"""Models whose samples belong together: what each computes, and the unit that capture finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.language.graph import Unit

WIDTH = 8

Body = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From features [samples, width], a value of each sample and its reward to the loss."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.body = body

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.body(x, self.head(x).squeeze(-1), rewards)


def batch(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        "rewards": torch.randn(size, generator=generator, dtype=torch.float64).to(dtype),
    }


def build(body: Body) -> Model:
    torch.manual_seed(0)
    return Model(body)


def source(body: Body, make: Callable[[int], object] = batch) -> ModelSource:
    return ModelSource(
        path=Path(__file__), build=lambda: build(body), batch=make, loss=None, dependencies=()
    )


def chunked(x, v, r):
    chosen, rejected = v.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def sliced(x, v, r):
    half = len(v) // 2
    return -F.logsigmoid(v[:half] - v[half:]).mean()


def split_in_two(x, v, r):
    a, b = torch.split(x, x.size(0) // 2)
    return F.cosine_embedding_loss(a, b, torch.ones(len(a)))


def split_evenly(x, v, r):
    a, b = torch.tensor_split(v, 2)
    return F.margin_ranking_loss(a, b, torch.ones_like(a), margin=0.5)


def viewed_as_halves(x, v, r):
    y = x.view(2, -1, x.shape[-1])
    return (y[0] - y[1]).square().sum(-1).mean()


def rolled_by_half(x, v, r):
    return -F.logsigmoid(v - v.roll(len(v) // 2)).mean()


def strided(x, v, r):
    return -F.logsigmoid(v[0::2] - v[1::2]).mean()


def numbered(x, v, r):
    first = torch.arange(0, len(v), 2)
    return -F.logsigmoid(v[first] - v[first + 1]).mean()


def viewed_as_pairs(x, v, r):
    chosen, rejected = v.view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


def reshaped(x, v, r):
    return -v.reshape(len(v) // 2, 2).log_softmax(-1)[:, 0].mean()


def triplets_stacked(x, v, r):
    anchor, near, far = x.chunk(3)
    return F.relu((anchor - near).norm(dim=-1) - (anchor - far).norm(dim=-1) + 1).mean()


def triplets_sliced(x, v, r):
    third = len(x) // 3
    return F.triplet_margin_loss(x[:third], x[third : 2 * third], x[2 * third :])


def triplets_strided(x, v, r):
    return F.triplet_margin_loss(x[::3], x[1::3], x[2::3])


def groups(x, v, r):
    of_group = r.view(-1, 4)
    advantage = of_group - of_group.mean(1, keepdim=True)
    advantage = advantage / (of_group.std(1, keepdim=True) + 1e-4)
    return -(advantage.view(-1) * v).mean()


def groups_repeated(x, v, r):
    return -((r - r.view(-1, 4).mean(1).repeat_interleave(4)) * v).mean()


def groups_of_pairs(x, v, r):
    """Two halves stacked, in each of which two neighbours belong together."""
    chosen, rejected = v.chunk(2)
    return -(chosen - rejected).view(-1, 2).log_softmax(-1)[:, 0].mean()


def last_of_each(x, v, r):
    """A place of each sample by its number, then halves."""
    places = torch.stack([x, 2 * x], 1)
    a, b = places[torch.arange(len(x)), (r > 0).long()].sum(-1).chunk(2)
    return -F.logsigmoid(a - b).mean()


def views_of_pairs(x, v, r):
    """Two views inside the model, of a batch whose halves are stacked."""
    p, q = torch.cat([x, 2 * x]).chunk(2)
    a, b = (p * q.detach()).sum(-1).chunk(2)
    return -F.logsigmoid(a - b).mean()


def labels_and_pairs(x, v, r):
    """A mean over labels of the chosen half, beside the loss of pairs."""
    half = len(v) // 2
    labels = torch.where(r > 0, 1, 3)
    return F.cross_entropy(x[:half], labels[:half]) - F.logsigmoid(v[:half] - v[half:]).mean()


def labels_of_pairs(x, v, r):
    """A mean over the pairs that have a label."""
    half = len(v) // 2
    labels = torch.where(r[:half] > -0.5, 3, -100)
    return F.cross_entropy(x[:half] - x[half:], labels)


UNITS: dict[Body, Unit] = {
    chunked: Unit(size=2, runs=2),
    strided: Unit(size=2),
    groups: Unit(size=4),
    triplets_stacked: Unit(size=3, runs=3),
    groups_of_pairs: Unit(size=4, runs=2),
    sliced: Unit(size=2, runs=2),
    viewed_as_halves: Unit(size=2, runs=2),
    viewed_as_pairs: Unit(size=2),
    groups_repeated: Unit(size=4),
    numbered: Unit(size=2),
    rolled_by_half: Unit(size=2, runs=2),
    split_in_two: Unit(size=2, runs=2),
    split_evenly: Unit(size=2, runs=2),
    reshaped: Unit(size=2),
    triplets_sliced: Unit(size=3, runs=3),
    triplets_strided: Unit(size=3),
    last_of_each: Unit(size=2, runs=2),
    views_of_pairs: Unit(size=2, runs=2),
    labels_and_pairs: Unit(size=2, runs=2),
    labels_of_pairs: Unit(size=2, runs=2),
}


def each_alone(x, v, r):
    return (v - r).square().mean()


def two_views(x, v, r):
    """Both views of a sample are made of it inside the model."""
    a, b = torch.cat([x, 2 * x]).chunk(2)
    return (a - b).square().mean()


def mixed_up(x, v, r):
    return (0.7 * x + 0.3 * x.flip(0)).square().mean()


def centred(x, v, r):
    return (v - v.mean()).square().mean()


def compared(x, v, r):
    """Each half with all of the other."""
    a, b = x.chunk(2)
    return F.cross_entropy(a @ b.T, torch.arange(len(a)))


NO_UNITS = (each_alone, two_views, mixed_up, centred)
"""Models of samples alone, or in which all samples of the batch meet."""

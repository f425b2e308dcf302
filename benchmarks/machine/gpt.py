"""The model file of a small GPT in several sizes, whose plans are predicted and run; `routed` has
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planner.capture import capture_source, load_model_file
from planner.language.graph import ModelGraph

MODELS = {
    "tiny": {"hidden": 32, "layers": 2, "sequence": 16},
    "gpt": {"hidden": 192, "layers": 4, "sequence": 128},
    "deep": {"hidden": 96, "layers": 8, "sequence": 64},
    "wide": {"hidden": 384, "layers": 2, "sequence": 64},
    "routed": {"hidden": 192, "layers": 4, "sequence": 128, "experts": 8},
    "long": {"hidden": 64, "layers": 2, "sequence": 4096},
}
"""Their sizes; `tiny` is for quick runs."""

TOLD = ("gpt", "deep", "wide")
"""Those of which figures are told."""

GLOBAL_BATCH = 16

MODEL_FILE = """import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, LAYERS, SEQUENCE, VOCABULARY, HEADS = {hidden}, {layers}, {sequence}, 256, 4
EXPERTS = {experts}


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    # Two of the experts take each token.

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) / (2 * HIDDEN) ** 0.5)

    def forward(self, x):
        import transformers.integrations.moe  # has the product of runs in fp32

        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        rows = x.reshape(-1, HIDDEN)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        experts, order = chosen.reshape(-1).sort(stable=True)
        counts = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0).to(torch.int32)
        inside = F.gelu(grouped_mm(rows[order // 2], self.up, ends))
        made = grouped_mm(inside, self.down, ends)
        made = made * weights.reshape(-1)[order].unsqueeze(-1)
        return made[order.argsort()].view(len(rows), 2, -1).sum(1).view(x.shape)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.feed = {feed}()

    def forward(self, x):
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, s, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def model():
    return Model()


def batch(size):
    ids = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {{"ids": ids, "labels": ids}}
"""


def file_of(sizes: Mapping[str, int]) -> str:
    """Return the text of a model's file; without `experts` it has none."""
    of = {"experts": 0} | dict(sizes)
    return MODEL_FILE.format(**of, feed="Experts" if of["experts"] else "Feed")


def write_model(name: str, folder: Path) -> tuple[Path, ModelGraph]:
    """Write a model's file into a folder; return it and its capture."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.py"
    path.write_text(file_of(MODELS[name]))
    return path, capture_source(load_model_file(path))

"""Megatron's activation formula, to the byte, from a captured layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from costmodel.memory.saved import saved_tensors
from planner.units import DTYPE_BYTES
from tests.captures import capture_module

S, H, A, B = 16, 32, 4, 3
"""Sequence, hidden size, heads, microbatch: s, h, a and b of the formula."""


class Layer(nn.Module):
    """A layer as Korthikanti et al. 2022 count it: attention written out, three dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, s, A, h // A).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = F.dropout(torch.softmax(q @ k.transpose(-2, -1), dim=-1), 0.1)
        y = (scores @ v).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.out(y), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(H, H), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@pytest.fixture(scope="module")
def program():
    model = Model().bfloat16()
    graph = capture_module(
        model,
        {"x": torch.randn(2, S, H, dtype=torch.bfloat16)},
        {"x": torch.randn(3, S, H, dtype=torch.bfloat16)},
        name="megatron",
    )
    uses = [block.class_index for block in graph.blocks]
    return graph.classes[max(uses, key=uses.count)].bind(B)


def test_a_standard_layer_keeps_what_megatrons_formula_says(program):
    """M16: sbh (34 + 5 a s / h) bytes in 16 bits, and the norms' mean and deviation, which the
    formula leaves out as small: 2 norms of 2 numbers a row in fp32."""
    formula = S * B * H * 34 + 5 * A * S * S * B
    statistics = 2 * 2 * S * B * DTYPE_BYTES["float32"]
    assert saved_tensors(program, device_type="cuda").num_bytes == formula + statistics

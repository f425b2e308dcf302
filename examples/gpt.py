"""A byte-level GPT in ordinary PyTorch: 3.2 million parameters, next-byte loss.

A model file for planner defines two functions: `model()`, and `batch(size)`, an example
batch of that many samples. Nothing here knows that the model will be trained in parallel.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256
SEQUENCE = 128
HIDDEN = 256
HEADS = 8
LAYERS = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        batch, sequence, hidden = x.shape

        def heads(t):
            return t.view(batch, sequence, HEADS, hidden // HEADS).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(batch, sequence, hidden))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes and their positions in, mean loss of the next byte out."""

    def __init__(self):
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def logits(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def forward(self, tokens, targets):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def model():
    return GPT()


def batch(size):
    """(tokens, targets), each (size, SEQUENCE) int64."""
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1))
    return tokens[:, :-1], tokens[:, 1:]

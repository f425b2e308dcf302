"""Tiny models that tests share: plain ones here, Hugging Face ones built from a config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 64
SEQUENCE = 16
HIDDEN = 32
HEADS = 4


@dataclass(frozen=True)
class TinyModel:
    """A model by name: how to build it, a batch of a given size, and a loss if it has none."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    needs_transformers: bool = False


class PlainAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            p(x).view(b, s, HEADS, h // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = PlainAttention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def gpt_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def text_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class PlainMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def mlp_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


class MlpWithTarget(PlainMLP):
    def forward(self, x, target):
        return F.mse_loss(super().forward(x), target)


class UNet(nn.Module):
    """Three levels down and up with additive and concatenated skips, convolutions inside."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, image, target):
        skips = []
        x = image
        for conv in self.down:
            x = torch.relu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = torch.relu(conv(torch.cat([x, skips.pop()], dim=1)))
        return F.mse_loss(self.out(x), target)


def image_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    image = torch.randn(size, 2, 8, 8, generator=generator)
    return {"image": image, "target": image.flip(1).contiguous()}


class NormedMLP(nn.Module):
    """An MLP with BatchNorm: statistics over the batch, running ones in buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
        )
        self.out = nn.Linear(32, 4)

    def forward(self, x, target):
        return F.mse_loss(self.out(self.layers(x)), target)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        stride = 2 if out_channels != channels else 1
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, out_channels), nn.GroupNorm(2, out_channels)
        self.short = nn.Conv2d(channels, out_channels, 1, stride) if stride == 2 else nn.Identity()

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.stage1 = nn.Sequential(ResidualBlock(4, 4), ResidualBlock(4, 4))
        self.stage2 = nn.Sequential(ResidualBlock(4, 8), ResidualBlock(8, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, image, label):
        x = F.max_pool2d(torch.relu(self.stem(image)), 2)
        x = F.adaptive_avg_pool2d(self.stage2(self.stage1(x)), 1).flatten(1)
        return F.cross_entropy(self.head(x), label)


def label_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    label = torch.randint(0, 10, (size,), generator=generator)
    return {"image": image_batch(size)["image"], "label": label}


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(2, HIDDEN, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.position = nn.Parameter(torch.randn(1, 17, HIDDEN) * 0.02)
        layer = {"dim_feedforward": 2 * HIDDEN, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, norm_first=True, **layer),
            num_layers=2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, image, label):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), label)


class EncoderDecoder(nn.Module):
    """Every decoder layer reads the encoder's output."""

    def __init__(self):
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, HIDDEN) for _ in range(2))
        options = {"dim_feedforward": 2 * HIDDEN, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, **options) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(HIDDEN, HEADS, **options) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        memory = self.source(ids)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(labels)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build_hf(family: str, **changes: Any) -> nn.Module:
    """A tiny Hugging Face model from its config, without dropout unless asked for."""
    import transformers

    transformers.logging.set_verbosity_error()
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    decoder = common | {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2 * SEQUENCE,
    }
    settings: dict[str, dict[str, Any]] = {
        "GPT2LMHeadModel": common
        | {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 2 * SEQUENCE}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "LlamaForCausalLM": decoder,
        "Qwen3ForCausalLM": decoder | {"head_dim": HIDDEN // HEADS},
        "MixtralForCausalLM": decoder | {"num_local_experts": 4},
        "BertForMaskedLM": common
        | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
        | {"intermediate_size": 2 * HIDDEN, "max_position_embeddings": 2 * SEQUENCE}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "T5ForConditionalGeneration": common
        | {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN, "num_layers": 2}
        | {"num_heads": HEADS, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    }
    model_class = getattr(transformers, family)
    return model_class(model_class.config_class(**(settings[family] | changes)))


TELLING = frozenset({"mlp", "batchnorm-mlp", "resnet", "gpt", "encoder-decoder", "hf-llama"})
"""Tiny models that differ most: statistics over a batch, convolutions, skips, rotary positions."""


def telling_first(
    names: Iterable[str] | None = None, telling: Collection[str] = TELLING
) -> list[Any]:
    """Return test parameters of all names (None: of tiny models); but a few are marked slow."""
    return [
        name if name in telling else pytest.param(name, marks=pytest.mark.slow)
        for name in (tiny_models() if names is None else names)
    ]


def tiny_models() -> dict[str, TinyModel]:
    """Every tiny model by name."""
    models = [
        TinyModel("gpt", PlainGPT, gpt_batch),
        TinyModel("mlp", MlpWithTarget, mlp_batch),
        TinyModel("batchnorm-mlp", NormedMLP, mlp_batch),
        TinyModel("resnet", ResNet, label_batch),
        TinyModel("unet", UNet, image_batch),
        TinyModel("vit", VisionTransformer, label_batch),
        TinyModel("encoder-decoder", EncoderDecoder, gpt_batch),
    ]
    for name, family in {
        "hf-gpt2": "GPT2LMHeadModel",
        "hf-llama": "LlamaForCausalLM",
        "hf-qwen3": "Qwen3ForCausalLM",
        "hf-mixtral": "MixtralForCausalLM",
        "hf-bert": "BertForMaskedLM",
        "hf-t5": "T5ForConditionalGeneration",
    }.items():
        models.append(
            TinyModel(
                name, lambda family=family: build_hf(family), text_batch, needs_transformers=True
            )
        )
    return {m.name: m for m in models}

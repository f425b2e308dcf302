"""Sizes of well-known models, for rows that name one and leave its columns blank.

From the configurations their authors published (config.json of the model cards, or the paper
where there is none).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """Columns of a model. Experts' `ffn_hidden` is one expert's, and `experts_per_token` those
    the router picks; `shared_experts` see every token. `query_rank`, `key_rank` and `rope_dim` are
    latent attention's (`planner.language.templates.Latent`).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    gated_ffn: int
    vocab: int
    head_dim: int | None = None
    num_experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    dense_layers: int = 0
    """First layers with an ordinary feed-forward."""
    dense_ffn: int = 0
    """Its width."""
    qk_norm: int = 0
    """1 where heads of queries and keys are normed."""
    bias: int = 0
    """1 where products of a gated model add biases."""


def _model(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn_hidden: int,
    gated_ffn: int,
    vocab: int,
    head_dim: int | None = None,
    *,
    experts: tuple[int, int, int] = (1, 1, 0),
    latent: tuple[int, int, int] = (0, 0, 0),
    dense: tuple[int, int] = (0, 0),
    qk_norm: int = 0,
    bias: int = 0,
) -> NamedModel:
    return NamedModel(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        gated_ffn=gated_ffn,
        vocab=vocab,
        head_dim=head_dim,
        num_experts=experts[0],
        experts_per_token=experts[1],
        shared_experts=experts[2],
        query_rank=latent[0],
        key_rank=latent[1],
        rope_dim=latent[2],
        dense_layers=dense[0],
        dense_ffn=dense[1],
        qk_norm=qk_norm,
        bias=bias,
    )


# Experts: routed, picked for a token, shared. Latent attention: ranks of queries and of keys and
# values, and what keys are wider than values. Dense: first layers with an ordinary feed-forward,
# and its width.
# fmt: off
NAMED = (
    (r"deepseekv3|deepseekr1(?!.*distill)",
     _model(61, 7168, 128, 128, 2048, 1, 129280, 128, experts=(256, 8, 1), latent=(1536, 512, 64),
            dense=(3, 18432))),
    (r"kimik2",
     _model(61, 7168, 64, 64, 2048, 1, 163840, 128, experts=(384, 8, 1), latent=(1536, 512, 64),
            dense=(1, 18432))),
    (r"moonlight",
     _model(27, 2048, 16, 16, 1408, 1, 163840, 128, experts=(64, 6, 2), latent=(0, 512, 64),
            dense=(1, 11264))),
    (r"deepseekv2lite",
     _model(27, 2048, 16, 16, 1408, 1, 102400, 128, experts=(64, 6, 2), latent=(0, 512, 64),
            dense=(1, 10944))),
    (r"deepseekv2",
     _model(60, 5120, 128, 128, 1536, 1, 102400, 128, experts=(160, 6, 2), latent=(1536, 512, 64),
            dense=(1, 12288))),
    (r"mixtral8x22b", _model(56, 6144, 48, 8, 16384, 1, 32768, experts=(8, 2, 0))),
    (r"mixtral", _model(32, 4096, 32, 8, 14336, 1, 32000, experts=(8, 2, 0))),
    (r"qwen3235b", _model(94, 4096, 64, 4, 1536, 1, 151936, 128, experts=(128, 8, 0), qk_norm=1)),
    (r"qwen330b", _model(48, 2048, 32, 4, 768, 1, 151936, 128, experts=(128, 8, 0), qk_norm=1)),
    (r"gptoss120b", _model(36, 2880, 64, 8, 2880, 1, 201088, 64, experts=(128, 4, 0), bias=1)),
    (r"gptoss20b", _model(24, 2880, 64, 8, 2880, 1, 201088, 64, experts=(32, 4, 0), bias=1)),
    (r"grok1", _model(64, 6144, 48, 8, 32768, 1, 131072, experts=(8, 2, 0))),
    (r"llama4.*maverick", _model(48, 5120, 40, 8, 8192, 1, 202048, experts=(128, 1, 1))),
    (r"llama4", _model(48, 5120, 40, 8, 8192, 1, 202048, experts=(16, 1, 1))),
    (r"llama31?405b", _model(126, 16384, 128, 8, 53248, 1, 128256)),
    (r"llama3[13]?70b", _model(80, 8192, 64, 8, 28672, 1, 128256)),
    (r"llama31?8b", _model(32, 4096, 32, 8, 14336, 1, 128256)),
    (r"llama.*70b", _model(80, 8192, 64, 8, 28672, 1, 32000)),
    (r"llama.*65b", _model(80, 8192, 64, 64, 22016, 1, 32000)),
    (r"llama.*3[03]b", _model(60, 6656, 52, 52, 17920, 1, 32000)),
    (r"llama.*13b", _model(40, 5120, 40, 40, 13824, 1, 32000)),
    (r"llama.*7b", _model(32, 4096, 32, 32, 11008, 1, 32000)),
    (r"internlm20b", _model(60, 5120, 40, 40, 13824, 1, 103168)),
    (r"internlm7b", _model(32, 4096, 32, 32, 11008, 1, 103168)),
    (r"nemotron4?340b", _model(96, 18432, 96, 8, 73728, 0, 256000)),
    (r"nemotron4?15b", _model(32, 6144, 48, 8, 24576, 0, 256000)),
    (r"mtnlg|turingnlg530b|530b", _model(105, 20480, 128, 128, 81920, 0, 51200)),
    (r"bloom176b|tr11", _model(70, 14336, 112, 112, 57344, 0, 250880)),
    (r"opt175b|gpt3175b|gpt175b", _model(96, 12288, 96, 96, 49152, 0, 51200)),
)
# fmt: on
"""Patterns, sought in this order in the name with all but letters and digits left out."""


def named_model(name: str) -> NamedModel | None:
    """Return the model a row names, if we know it.

    A size with a fraction (Llama-1.3B, Mixtral of 46.7B) is left out: no pattern has one, and
    without its point it would read as another size.
    """
    whole = re.sub(r"\d+\.\d+[-_ ]?b(?![a-z])", "", name.lower())
    squashed = re.sub(r"[^a-z0-9]", "", whole)
    return next((model for pattern, model in NAMED if re.search(pattern, squashed)), None)


def params_in_name(name: str) -> float | None:
    """Return the parameters that a name such as ``Foo-13B`` or ``ours 350M`` states."""
    found = re.search(r"(?<![\dx.])(\d+(?:\.\d+)?)[-_ ]?([bm])(?![a-z])", name.lower())
    return float(found[1]) * (1e9 if found[2] == "b" else 1e6) if found else None


def model_of_size(params: float) -> tuple[int, int]:
    """Return layers and hidden size of a usual model with this many parameters.

    12 * layers * hidden^2 parameters, hidden a multiple of 128 near 128 times the layers.
    """
    hidden = 128 * max(1, round((params * 128 / 12) ** (1 / 3) / 128))
    return max(1, round(params / (12 * hidden**2))), hidden

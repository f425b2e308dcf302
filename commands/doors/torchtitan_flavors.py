"""Sizes of torchtitan's models by name and flavor.

Source: pytorch/torchtitan v0.2.2 (73a0e6979dd1), torchtitan/models/{llama3,qwen3,deepseek_v3}/
__init__.py and model/args.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from planner.language.templates import Experts, Latent, Transformer

Sizes = tuple[int, int, int, int, int]
"""Layers, width, heads, heads of keys, width of a feed-forward."""


def _decoder(sizes: Sizes, vocab: int, **more: Any) -> Transformer:
    layers, hidden, heads, kv_heads, ffn_hidden = sizes
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        **more,
    )


def _llama3(sizes: Sizes, seq_len: int, *, vocab: int = 128256) -> Transformer:
    return _decoder(sizes, vocab, seq_len=seq_len, epsilon=1e-5)


def _qwen3(
    sizes: Sizes,
    seq_len: int,
    *,
    vocab: int = 151936,
    tied: bool = False,
    experts: tuple[int, int, int] | None = None,
) -> Transformer:
    routed = None
    if experts is not None:
        routed = Experts(number=experts[0], per_token=experts[1], width=experts[2])
    return _decoder(
        sizes,
        vocab,
        seq_len=seq_len,
        head_dim=128,
        query_key_norm=True,
        tied=tied,
        experts=routed,
    )


def _deepseek_v3(
    sizes: Sizes,
    seq_len: int,
    *,
    vocab: int,
    experts: tuple[int, int, int, int],
    dense: int,
    query_rank: int,
) -> Transformer:
    number, per_token, width, shared = experts
    return _decoder(
        sizes,
        vocab,
        seq_len=seq_len,
        head_dim=128,
        epsilon=1e-5,
        latent=Latent(query_rank=query_rank, key_rank=512, rope_dim=64),
        experts=Experts(
            number=number, per_token=per_token, width=width, shared=shared, dense_layers=dense
        ),
    )


# A feed-forward of llama3 is 8/3 of the width, times its factor, up to its multiple. Experts:
# number, picked, width, shared.
# fmt: off
FLAVORS: dict[str, dict[str, Callable[[int], Transformer]]] = {
    "llama3": {
        "debugmodel": partial(_llama3, (6, 256, 16, 16, 768), vocab=2048),
        "8B": partial(_llama3, (32, 4096, 32, 8, 14336)),
        "70B": partial(_llama3, (80, 8192, 64, 8, 28672)),
        "405B": partial(_llama3, (126, 16384, 128, 8, 53248)),
    },
    "qwen3": {
        "debugmodel": partial(_qwen3, (8, 256, 16, 8, 3072), vocab=2048, tied=True),
        "0.6B": partial(_qwen3, (28, 1024, 16, 8, 3072), tied=True),
        "1.7B": partial(_qwen3, (28, 2048, 16, 8, 6144), tied=True),
        "4B": partial(_qwen3, (36, 2560, 32, 8, 9728), tied=True),
        "8B": partial(_qwen3, (36, 4096, 32, 8, 12288)),
        "14B": partial(_qwen3, (40, 5120, 40, 8, 17408)),
        "32B": partial(_qwen3, (64, 5120, 64, 8, 25600)),
        "debugmodel_moe": partial(_qwen3, (8, 256, 16, 8, 3072), vocab=2048, experts=(64, 8, 768)),
        "30B-A3B": partial(_qwen3, (48, 2048, 32, 4, 6144), experts=(128, 8, 768)),
        "235B-A22B": partial(_qwen3, (94, 4096, 64, 4, 12288), experts=(128, 8, 1536)),
    },
    "deepseek_v3": {
        "debugmodel": partial(
            _deepseek_v3, (6, 256, 16, 16, 1024), vocab=2048,
            experts=(8, 3, 256, 2), dense=1, query_rank=0,
        ),
        "16B": partial(
            _deepseek_v3, (27, 2048, 16, 16, 10944), vocab=102400,
            experts=(64, 6, 1408, 2), dense=1, query_rank=0,
        ),
        "236B": partial(
            _deepseek_v3, (60, 5120, 128, 128, 12288), vocab=102400,
            experts=(160, 6, 1536, 2), dense=1, query_rank=1536,
        ),
        "671B": partial(
            _deepseek_v3, (61, 7168, 128, 128, 18432), vocab=129280,
            experts=(256, 8, 2048, 1), dense=3, query_rank=1536,
        ),
    },
}
# fmt: on
"""By model and flavor, given the tokens of a sample. Flavors that name only a kernel of attention
(``8B_flex``) have the sizes of the one without."""


def sizes_of(model: str, flavor: str, seq_len: int) -> Transformer | None:
    """Return the sizes of a flavor on sequences of a length; None: it is not known."""
    flavors = FLAVORS.get(model, {})
    made = flavors.get(flavor) or flavors.get(
        flavor.removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    )
    return None if made is None else made(seq_len)

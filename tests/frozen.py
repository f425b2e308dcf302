"""Tiny models of which a part is frozen: by `requires_grad_(False)`, or by adapters of `peft`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.builders import PlainGPT, TinyModel, build_hf, gpt_batch, text_batch


class TiedGPT(PlainGPT):
    """The head multiplies by the token embedding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.head.weight = self.token.weight


def _first_half(name: str) -> bool:
    return name.startswith(("token", "position", "layers.0", "layers.1"))


TRAINED: dict[str, Callable[[str], bool]] = {
    "all-but-embeddings": lambda name: not name.startswith(("token", "position")),
    "second-half": lambda name: not _first_half(name),
    "first-half": _first_half,
    "all-but-middle": lambda name: not name.startswith(("layers.1", "layers.2")),
    "head": lambda name: name.startswith("head"),
    "norms": lambda name: "norm" in name,
    "biases": lambda name: name.endswith("bias"),
    "weights": lambda name: not name.endswith("bias"),
}
"""Which parameters of a `PlainGPT` train, by what is trained of it."""


def build_part(trains: Callable[[str], bool], *, tied: bool = False) -> nn.Module:
    """Return a tiny GPT in which only the parameters that `trains` names have gradients."""
    model = TiedGPT() if tied else PlainGPT()
    for name, param in model.named_parameters():
        param.requires_grad_(trains(name))
    return model


ATTENTION = {
    "GPT2LMHeadModel": ["c_attn"],
    "LlamaForCausalLM": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
"""The products of attention that adapters are added to, by family."""


def build_lora(family: str, dropout: float = 0.0, *, rank: int = 4, **changes: Any) -> nn.Module:
    """Return a tiny Hugging Face model with LoRA adapters on attention.

    Adapters begin with values other than 0, where no gradient would reach half of them.
    """
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=ATTENTION[family],
        fan_in_fan_out=family == "GPT2LMHeadModel",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft reads an attribute that transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(build_hf(family, **changes), config)


def frozen_models() -> dict[str, TinyModel]:
    """Every partly frozen model by name."""
    models = [
        TinyModel(f"gpt-{what}", lambda trains=trains: build_part(trains), gpt_batch)
        for what, trains in TRAINED.items()
    ]
    models.append(
        TinyModel("gpt-tied-norms", lambda: build_part(TRAINED["norms"], tied=True), gpt_batch)
    )
    for short, family in {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}.items():
        for dropout in (0.0, 0.1):
            models.append(
                TinyModel(
                    f"lora-{short}" + "-dropout" * (dropout > 0),
                    lambda family=family, dropout=dropout: build_lora(family, dropout),
                    text_batch,
                    needs_transformers=True,
                )
            )
    return {model.name: model for model in models}

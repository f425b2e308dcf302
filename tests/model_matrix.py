"""A matrix of tiny models, which all train in one process on a CPU: real families by config,
and hand-written ones with the constructs people use.

The plain ones of `tests.builders` are part of it. Nothing is downloaded. Dropout is off, so that
two runs of a model on a batch are equal.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests import opaque_models
from tests.builders import (
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCABULARY,
    TinyModel,
    gpt_batch,
    image_batch,
    label_batch,
    mlp_batch,
    text_batch,
    tiny_models,
)
from tests.opaque_models import LoopedExperts

REFUSED: dict[str, str] = {
    "hf-gemma3n": "forward writes in place into parameter model.layers.0.altup.",
}
"""Models that capture refuses today, and how its reason begins."""


def model_matrix() -> dict[str, TinyModel]:
    """Every model of the matrix by name."""
    models = list(tiny_models().values())
    models += [TinyModel(name, *entry) for name, entry in _HAND_WRITTEN.items()]
    models += [_hf(name, *entry) for name, entry in _FAMILIES.items()]
    return {model.name: model for model in models}


# ---------------------------------------------------------------------------- by configuration

_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = _COMMON | {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_HEAD = {"head_dim": HIDDEN // HEADS}
_ENCODER = _DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WINDOW = {"sliding_window": SEQUENCE // 2, "layer_types": ["sliding_attention", "full_attention"]}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_EXPERTS = {
    "moe_intermediate_size": HIDDEN,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_NO_DROPOUT_AUDIO = {
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def _image_labels(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (size,), generator=generator),
    }


def _segments(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "pixel_values": torch.randn(size, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 4, (size, 32, 32), generator=generator),
    }


def _swin_images(size: int) -> dict[str, torch.Tensor]:
    batch = _image_labels(size)
    return batch | {"pixel_values": batch["pixel_values"].repeat(1, 1, 2, 2)}


def _sound_labels(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "input_values": torch.randn(size, 400, generator=generator),
        "labels": torch.randint(0, 4, (size,), generator=generator),
    }


def _spectra(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "input_features": torch.randn(size, 8, 2 * SEQUENCE, generator=generator),
        "labels": torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator),
    }


def _pairs(size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(3, VOCABULARY, (size, SEQUENCE), generator=generator)
    ids[:, -1] = VOCABULARY - 1  # the end of the text, whose state is the text's
    image = torch.randn(size, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": image, "return_loss": True}


def _labelled_text(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(3, VOCABULARY, (size, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 2, (size,), generator=generator)}


def _padded(size: int) -> dict[str, torch.Tensor]:
    """Sequences of several lengths, filled up behind; all labels count, so that parts do alike."""
    lengths = torch.arange(size)[:, None] % 5 + SEQUENCE // 2
    return text_batch(size) | {"attention_mask": (torch.arange(SEQUENCE) < lengths).long()}


def _packed(size: int) -> dict[str, torch.Tensor]:
    """Two documents in each sequence, each with positions of its own."""
    begins = torch.arange(size)[:, None] % 5 + SEQUENCE // 2
    at = torch.arange(SEQUENCE).expand(size, -1)
    return text_batch(size) | {"position_ids": torch.where(at < begins, at, at - begins)}


def _discriminated(size: int) -> dict[str, torch.Tensor]:
    batch = text_batch(size)
    return batch | {"labels": batch["labels"] % 2}


_FAMILIES: dict[str, tuple[Any, ...]] = {
    # decoders
    "hf-llama-padded": ("LlamaForCausalLM", _GROUPED, _padded),
    "hf-llama-packed": ("LlamaForCausalLM", _GROUPED | {"use_cache": False}, _packed),
    "hf-mistral-packed": (
        "MistralForCausalLM",
        _GROUPED | {"sliding_window": SEQUENCE // 2, "use_cache": False},
        _packed,
    ),
    "hf-mistral": ("MistralForCausalLM", _GROUPED | {"sliding_window": SEQUENCE // 2}),
    "hf-qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "hf-gemma": ("GemmaForCausalLM", _GROUPED | _HEAD),
    "hf-gemma2": ("Gemma2ForCausalLM", _GROUPED | _HEAD | _WINDOW),
    "hf-gemma3": ("Gemma3ForCausalLM", _GROUPED | _HEAD | _WINDOW),
    "hf-gemma3n": (
        "Gemma3nForCausalLM",
        _GROUPED
        | _HEAD
        | _WINDOW
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
        | {"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]}
        | {"altup_num_inputs": 2},
    ),
    "hf-gemma4": (
        "Gemma4ForCausalLM",
        _GROUPED
        | _HEAD
        | _WINDOW
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
        | {"num_kv_shared_layers": 0, "global_head_dim": 16},
    ),
    "hf-olmo": ("OlmoForCausalLM", _GROUPED),
    "hf-olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "hf-olmo3": ("Olmo3ForCausalLM", _GROUPED | _WINDOW),
    "hf-phi": ("PhiForCausalLM", _DECODER | {"partial_rotary_factor": 0.5}),
    "hf-phi3": ("Phi3ForCausalLM", _GROUPED),
    "hf-phimoe": ("PhimoeForCausalLM", _GROUPED | {"num_local_experts": 4}),
    "hf-stablelm": ("StableLmForCausalLM", _GROUPED | {"partial_rotary_factor": 0.5}),
    "hf-falcon": ("FalconForCausalLM", _DECODER | {"new_decoder_architecture": False}),
    "hf-bloom": (
        "BloomForCausalLM",
        _COMMON
        | {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "hf-opt": (
        "OPTForCausalLM",
        _DECODER
        | {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN}
        | {"dropout": 0.0, "layerdrop": 0.0},
    ),
    "hf-gpt-neox": ("GPTNeoXForCausalLM", _DECODER | {"rotary_pct": 0.5}),
    "hf-gptj": (
        "GPTJForCausalLM",
        _COMMON
        | {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS}
        | {"n_positions": 2 * SEQUENCE, "rotary_dim": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "hf-granite": ("GraniteForCausalLM", _GROUPED),
    "hf-cohere": ("CohereForCausalLM", _GROUPED),
    "hf-starcoder2": (
        "Starcoder2ForCausalLM",
        _GROUPED | {"residual_dropout": 0.0} | {"embedding_dropout": 0.0},
    ),
    "hf-nemotron": ("NemotronForCausalLM", _GROUPED),
    "hf-smollm3": ("SmolLM3ForCausalLM", _GROUPED),
    "hf-qwen3-moe": (
        "Qwen3MoeForCausalLM",
        _GROUPED
        | _HEAD
        | {"num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN},
    ),
    "hf-olmoe": ("OlmoeForCausalLM", _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "hf-gpt-oss": (
        "GptOssForCausalLM",
        _GROUPED | _HEAD | _WINDOW | {"num_local_experts": 4} | {"num_experts_per_tok": 2},
    ),
    "hf-deepseek-v2": (
        "DeepseekV2ForCausalLM",
        _DECODER | _MLA | _EXPERTS | {"topk_method": "greedy"},
    ),
    "hf-deepseek-v3": ("DeepseekV3ForCausalLM", _DECODER | _MLA | _EXPERTS),
    "hf-glm4": ("Glm4ForCausalLM", _GROUPED | _HEAD),
    "hf-llama4": (
        "Llama4ForCausalLM",
        _GROUPED
        | _HEAD
        | {"intermediate_size_mlp": 64}
        | {"num_local_experts": 2, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": SEQUENCE // 2},
    ),
    "hf-mamba": (
        "MambaForCausalLM",
        _COMMON | {"hidden_size": HIDDEN, "num_hidden_layers": 2} | {"state_size": 4},
    ),
    "hf-mamba2": (
        "Mamba2ForCausalLM",
        _COMMON
        | {"hidden_size": HIDDEN, "num_hidden_layers": 2}
        | {"state_size": 4, "head_dim": 16, "num_heads": 4, "n_groups": 1}
        | {"chunk_size": 8},
    ),
    # encoders
    "hf-roberta": ("RobertaForMaskedLM", _ENCODER | {"max_position_embeddings": 40}),
    "hf-electra": ("ElectraForPreTraining", _ENCODER | {"embedding_size": 16}, _discriminated),
    "hf-deberta-v2": (
        "DebertaV2ForMaskedLM",
        _ENCODER
        | {"relative_attention": True}
        | {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    ),
    "hf-distilbert": (
        "DistilBertForMaskedLM",
        _COMMON
        | {"dim": HIDDEN, "n_layers": 2}
        | {"n_heads": HEADS, "hidden_dim": 64, "dropout": 0.0}
        | {"attention_dropout": 0.0, "max_position_embeddings": 32},
    ),
    "hf-bert-classifier": ("BertForSequenceClassification", _ENCODER, _labelled_text),
    # encoder-decoders
    "hf-bart": (
        "BartForConditionalGeneration",
        _COMMON
        | {"d_model": HIDDEN}
        | {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
        | {"decoder_ffn_dim": 64, "encoder_attention_heads": HEADS, "dropout": 0.0}
        | {"decoder_attention_heads": HEADS, "max_position_embeddings": 32}
        | {"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ),
    # vision
    "hf-vit": (
        "ViTForImageClassification",
        _ENCODER | {"image_size": 16, "patch_size": 4} | {"num_labels": 4},
        _image_labels,
    ),
    "hf-deit": (
        "DeiTForImageClassification",
        _ENCODER | {"image_size": 16, "patch_size": 4} | {"num_labels": 4},
        _image_labels,
    ),
    "hf-swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16}
        | {"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 4}
        | {"drop_path_rate": 0.0},
        _swin_images,
    ),
    "hf-convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [2, 2]}
        | {"num_stages": 2, "patch_size": 2, "num_labels": 4},
        _image_labels,
    ),
    "hf-resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16]}
        | {"depths": [1, 1], "layer_type": "basic", "num_labels": 4},
        _image_labels,
    ),
    "hf-segformer": (
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]}
        | {"hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2]}
        | {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": 4}
        | {"decoder_hidden_size": 16, "drop_path_rate": 0.0}
        | {"classifier_dropout_prob": 0.0},
        _segments,
    ),
    # sound, and pictures with words
    "hf-wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        _DECODER
        | _NO_DROPOUT_AUDIO
        | {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
        | {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
        | {"num_labels": 4},
        _sound_labels,
    ),
    "hf-whisper": (
        "WhisperForConditionalGeneration",
        _COMMON
        | {"d_model": HIDDEN}
        | {"num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
        | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
        | {"max_source_positions": SEQUENCE, "max_target_positions": SEQUENCE}
        | {"decoder_start_token_id": 1, "suppress_tokens": None}
        | {"begin_suppress_tokens": None},
        _spectra,
    ),
    "hf-clip": (
        "CLIPModel",
        {"projection_dim": 16}
        | {"text_config": _DECODER | {"eos_token_id": VOCABULARY - 1}}
        | {
            "vision_config": {"image_size": 16, "patch_size": 4, "hidden_size": HIDDEN}
            | {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        },
        _pairs,
    ),
}


def _hf(
    name: str,
    family: str,
    settings: dict[str, Any],
    batch: Callable[[int], Any] = text_batch,
) -> TinyModel:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, family)
        return model_class(model_class.config_class(**copy.deepcopy(settings)))

    return TinyModel(name, build, batch, needs_transformers=True)


# ---------------------------------------------------------------------------- written by hand


class ResidualMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.SiLU())
            for _ in range(4)
        )
        self.scale = nn.Parameter(torch.full((4,), 0.1))
        self.outer = nn.Linear(HIDDEN, 4)

    def forward(self, x, target):
        x = self.inner(x)
        for index, layer in enumerate(self.layers):
            x = x + self.scale[index] * layer(x)
        return F.mse_loss(self.outer(x), target)


class UnrolledRecurrence(nn.Module):
    """An LSTM's cell written out over time, its gates one product cut in four."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.gates = nn.Linear(2 * HIDDEN, 4 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        tokens = self.token(ids)
        state = memory = torch.zeros_like(tokens[:, 0])
        states = []
        for time in range(ids.shape[1]):
            gates = self.gates(torch.cat([tokens[:, time], state], dim=-1))
            write, keep, read, value = gates.chunk(4, dim=-1)
            memory = torch.sigmoid(keep) * memory + torch.sigmoid(write) * torch.tanh(value)
            state = torch.sigmoid(read) * torch.tanh(memory)
            states.append(state)
        logits = self.head(torch.stack(states, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class BatchNormResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, image, label):
        x = self.stem(image).relu_()
        for layer in self.layers:
            x = torch.relu(x + layer(x))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), label)


class TopTwoExperts(nn.Module):
    """Every token goes through two of four experts, weighted by the router."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 2 * HIDDEN) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * HIDDEN, HIDDEN) * 0.05)

    def forward(self, x):
        chances = self.router(x).softmax(dim=-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        shares = torch.zeros_like(chances).scatter(-1, chosen, weights)
        inner = F.gelu(torch.einsum("bsh,ehf->besf", x, self.up))
        return torch.einsum("besf,efh,bse->bsh", inner, self.down, shares)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.layers = nn.ModuleList(TopTwoExperts() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.token(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class EinsumAttention(nn.Module):
    """Attention as products of letters, with weights of three dims and a mask of its own."""

    def __init__(self):
        super().__init__()
        width = HIDDEN // HEADS
        self.qkv = nn.Parameter(torch.randn(3, HIDDEN, HEADS, width) * HIDDEN**-0.5)
        self.out = nn.Parameter(torch.randn(HEADS, width, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x):
        q, k, v = torch.einsum("bsh,khnd->kbnsd", x, self.qkv)
        scores = torch.einsum("bnsd,bntd->bnst", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return torch.einsum("bnst,bntd,ndh->bsh", mixed, v, self.out)


class ComplexRotary(nn.Module):
    """Attention whose positions are rotations of complex numbers, as in the first Llama."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        width = HIDDEN // HEADS
        turns = 1.0 / 10000.0 ** (torch.arange(0, width, 2)[: width // 2].float() / width)
        angles = torch.outer(torch.arange(SEQUENCE).float(), turns)
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))

    def _rotate(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.rotations[: x.shape[1], None, :]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, HEADS, -1) for p in (self.q, self.k, self.v))
        q, k = self._rotate(q), self._rotate(k)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class ChunkedScan(nn.Module):
    """Linear attention by chunks: inside a chunk a product, between chunks a carried state."""

    def __init__(self, chunk: int = 4):
        super().__init__()
        self.chunk = chunk
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), torch.sigmoid(self.k(x)), self.v(x)
        state = torch.zeros_like(k[:, 0, :, None] * v[:, 0, None, :])
        done = []
        for start in range(0, x.shape[1], self.chunk):
            piece = slice(start, start + self.chunk)
            inside = (q[:, piece] @ k[:, piece].transpose(1, 2)).tril()
            done.append(inside @ v[:, piece] + q[:, piece] @ state)
            state = 0.9 * state + k[:, piece].transpose(1, 2) @ v[:, piece]
        return torch.cat(done, dim=1) / HIDDEN


class TokenModel(nn.Module):
    """Two residual layers of a kind between an embedding and a head."""

    def __init__(self, layer: Callable[[], nn.Module], *, is_tied: bool = False):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.token.weight

    def forward(self, ids, labels):
        x = self.token(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            weight_norm(nn.Linear(8, HIDDEN)), nn.Tanh(), weight_norm(nn.Linear(HIDDEN, 4))
        )

    def forward(self, x, target):
        return F.mse_loss(self.layers(x), target)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 4)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        parametrize.register_parametrization(self.middle, "weight", _Symmetric())

    def forward(self, x, target):
        return F.mse_loss(self.outer(torch.relu(self.middle(torch.relu(self.inner(x))))), target)


class Recommender(nn.Module):
    """Embedding tables of several sizes, their pairwise products, and dense features."""

    SIZES = (50, 20, 10)

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 16) for size in self.SIZES)
        self.dense = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse, click):
        bottom = self.dense(dense)
        vectors = [bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        pairs = [(a * b).sum(dim=-1) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
        score = self.top(torch.cat([bottom, torch.stack(pairs, dim=-1)], dim=-1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, click)


def click_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    tables = [torch.randint(0, n, (size,), generator=generator) for n in Recommender.SIZES]
    return {
        "dense": torch.randn(size, 8, generator=generator),
        "sparse": torch.stack(tables, dim=-1),
        "click": torch.randint(0, 2, (size,), generator=generator).float(),
    }


class Diffusion(nn.Module):
    """Predicts the noise in an image, told how noisy it is by a time embedding."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
        self.inner = nn.Conv2d(2, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(2)
        )
        self.outer = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image, noise, time):
        level = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = level * image + (1 - level**2).sqrt() * noise
        scales = torch.exp(torch.arange(8, device=time.device) * (-math.log(1000.0) / 7))
        angles = time[:, None] * 1000.0 * scales
        told = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.inner(noisy)
        for layer in self.layers:
            x = x + layer(x + told[:, :, None, None])
        return F.mse_loss(self.outer(x), noise)


def noisy_batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    image = image_batch(size)["image"]
    noise = torch.randn(image.shape, generator=generator)
    return {"image": image, "noise": noise, "time": torch.rand(size, generator=generator)}


class EncoderTakenOut(nn.Module):
    """The encoder of an encoder-decoder that is all there: half of its parameters are unused."""

    def __init__(self):
        super().__init__()
        options = {"dim_feedforward": 2 * HIDDEN, "dropout": 0.0, "batch_first": True}
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.both = nn.Transformer(HIDDEN, HEADS, 2, 2, **options)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.both.encoder.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@functools.cache
def _positions(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)


class KeptTables(nn.Module):
    """Tables for kinds of layers held in a set, from results that functools keeps."""

    KINDS = ("global", "local", "none")

    def __init__(self):
        super().__init__()
        self.kinds = set(self.KINDS)
        for kind in self.kinds:
            self.register_buffer(kind, torch.full((SEQUENCE,), len(kind) / 10))
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(EinsumAttention() for _ in self.KINDS)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    @functools.cached_property
    def _waves(self) -> torch.Tensor:
        return torch.linspace(0.1, 1.0, HIDDEN)

    def forward(self, ids, labels):
        angles = _positions(ids.shape[1])[:, None] * self._waves
        tables = {kind: torch.sin(angles + getattr(self, kind)[:, None]) for kind in self.kinds}
        x = self.token(ids)
        for kind, layer in zip(self.KINDS, self.layers, strict=True):
            x = x + layer(x + tables[kind])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mean_square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The loss of a model that returns an output."""
    return F.mse_loss(output, batch["target"])


class LossApart(nn.Module):
    """Returns its output; the loss is a function beside it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 4))

    def forward(self, x, target):
        return self.layers(x)


def named_batch(size: int) -> dict[str, torch.Tensor]:
    x, target = mlp_batch(size)
    return {"x": x, "target": target}


_HAND_WRITTEN: dict[str, tuple[Any, ...]] = {
    "residual-mlp": (ResidualMLP, mlp_batch),
    "unrolled-recurrence": (UnrolledRecurrence, gpt_batch),
    "batchnorm-resnet": (BatchNormResNet, label_batch),
    "mixture-of-experts": (MixtureOfExperts, gpt_batch),
    "looped-experts": (functools.partial(opaque_models.Chain, LoopedExperts), opaque_models.batch),
    "complex-rotary": (lambda: TokenModel(ComplexRotary), gpt_batch),
    "weight-norm": (WeightNormed, mlp_batch),
    "parametrized": (Parametrized, mlp_batch),
    "tied-embedding": (lambda: TokenModel(EinsumAttention, is_tied=True), gpt_batch),
    "einsum-attention": (lambda: TokenModel(EinsumAttention), gpt_batch),
    "chunked-scan": (lambda: TokenModel(ChunkedScan), gpt_batch),
    "recommender": (Recommender, click_batch),
    "diffusion": (Diffusion, noisy_batch),
    "encoder-taken-out": (EncoderTakenOut, gpt_batch),
    "kept-tables": (KeptTables, gpt_batch),
    "loss-apart": (LossApart, named_batch, mean_square),
}

"""Tiny model files of the families of transformers' mappings, for `benchmarks/families.py`.

A family's own configuration has its sizes shrunk, in parts as well; of its layers so many stay that
each kind is there. The model file is such as a user has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}

SEQUENCE, VOCABULARY, IMAGE = 16, 64, 32

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "input_size", "hidden_dim", "width", "word_embed_size"), 32),
    **dict.fromkeys(("embedding_dim", "attention_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("lru_width", "hidden_size_per_layer_input", "text_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_hidden_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("rotary_dim", "attention_rotary_dim"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "global_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim",), 8),
    **dict.fromkeys(("linear_num_heads", "mamba_num_heads", "index_n_heads", "qk_dim", "v_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "top_k_experts", "moe_num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("index_topk", "mamba_chunk_size", "chunk_size", "time_step_rank"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel"), 4),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "seq_length"), 64),
    **dict.fromkeys(("image_size", "img_size", "input_resolution"), IMAGE),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("sliding_window", "attention_window", "window"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("groups_width", "num_latents"), 8),
    **dict.fromkeys(("d_latents", "pooler_output_size", "out_hidden_size"), 32),
}
"""Sizes of tiny models, by what configurations call them; others stay as they are."""

DEPTHS = ("depths", "depth", "n_attn_blocks", "num_block_repeats")
"""Layers of stages: two of the first and one of each other stay, so that each kind is there."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
_GEMMA3N = {  # the last layers take keys of layers before them: so each kind is there twice
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_BY_SECTIONS = {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), _BY_SECTIONS),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"), _BY_SECTIONS),
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "moonshine": {"pad_token_id": 0},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_head": 8},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8},
    "levit": {"image_size": 224, "patch_size": 16, "hidden_sizes": [128, 256, 384]},
    **{name: {"image_size": 64, "window_size": 2} for name in ("swin", "donut-swin")},
    **dict.fromkeys(("glm46v", "glmga"), _BY_SECTIONS),
    **{name: {"image_size": 64} for name in ("mobilevitv2", "pvt_v2")},
    "hgnet_v2": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 32, 64, 128],
        "stage_mid_channels": [8, 16, 32, 64],
        "stage_out_channels": [32, 64, 128, 256],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "efficientnet": {"hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0},
    "bit": {"num_groups": 4},
    "textnet": {"image_size": [64, 64], "stem_out_channels": 32},
    "bamba": _MAMBA_HEADS | {"attn_layer_indices": [1]},
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {"text_config": _GEMMA3N},
    "falcon_h1": _MAMBA_HEADS | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA_HEADS | {"layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
}
"""What single families need beside, by name."""

FILE = '''"""A tiny {architecture} with random weights, as benchmarks/families.py makes it."""

from math import inf, nan  # noqa: F401  (configurations have them)

import torch
from transformers import {architecture}, {config}

CONFIG = {values}


def model():
    torch.manual_seed(0)
    return {architecture}({config}.from_dict(CONFIG))


def batch(size):
{batch}
'''

TEXT = """    ids = torch.randint(4, {vocabulary}, (size, {length}))
    return {{"input_ids": ids, "labels": ids}}"""
CLASSIFIED = """    ids = torch.randint(4, {vocabulary}, (size, {length}))
    return {{"input_ids": ids, "labels": torch.randint(0, 2, (size,))}}"""
PICTURES = """    pictures = torch.randn(size, {channels}, {image}, {image})
    return {{"pixel_values": pictures, "labels": torch.randint(0, 2, (size,))}}"""
SOUND = """    sound = torch.randn(size, {shape})
    return {{"{name}": sound, "labels": torch.randint(4, 32, (size, 4))}}"""


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values with tiny sizes, in parts as well.

    Of layers so many are kept that each kind is there, and what lists or tables say of them.
    """
    small = {}
    layers = next((n for k in LAYERS if isinstance(n := values.get(k), int)), 0)
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == layers > 2]
    kept = kinds_of_layers(lists, layers)
    for name, value in values.items():
        if name in ("out_features", "out_indices", "stage_names"):
            continue  # they name layers that may be gone
        is_part = name.endswith("config") or name in ("encoder", "decoder")
        if isinstance(value, dict) and is_part and "layer" not in name:
            value = shrunk(value)
        elif name in LAYERS and isinstance(value, int):
            value = len(kept)
        elif isinstance(value, list) and len(value) == layers > 2:
            value = [value[place] for place in kept]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            by_layer = {int(key): each for key, each in value.items()}
            value = {
                place: by_layer[layer] for place, layer in enumerate(kept) if layer in by_layer
            }
        elif name in DEPTHS and isinstance(value, list):
            value = [min(each, 1 if place else 2) for place, each in enumerate(value)]
        elif name == "hidden_sizes" and isinstance(value, list) and value[0] > 32:
            value = [-(-each * 4 // value[0]) * 8 for each in value]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            value = min(value, SIZES[name]) if value > 0 else value
        elif name.endswith("token_id") and isinstance(value, int):
            value = min(value, len(name) % 3)
        small[name] = value
    heads = small.get("num_heads")
    if isinstance(heads, list) and isinstance(small.get("embed_dim"), int):
        # of stages, of which each is twice as wide
        small["embed_dim"] = heads[0] * 8
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := small.get(name), dict) and "mrope_section" in rope:
            small[name] = rope | {"mrope_section": sections(small, rope)}
    if small.get("kv_lora_rank"):  # each head has a key of its own
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def sections(small: dict[str, Any], rope: dict[str, Any]) -> list[int]:
    """Return how many pairs of a head's entries rotate by time, height and width."""
    head = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def kinds_of_layers(lists: list[list[Any]], layers: int) -> list[int]:
    """Return layers, two at least, of which each kind has its first."""
    first: dict[str, int] = {}
    for place in range(layers):
        first.setdefault(repr([each[place] for each in lists]), place)
    kept = sorted(first.values())[:6]
    return kept if len(kept) > 1 else [*kept, *range(len(kept), 2)]


def write_model_file(kind: str, family: str, folder: Path) -> tuple[Path, str]:
    """Write a family's model file; raise where it has no configuration of its own."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    architecture = getattr(modeling_auto, MAPPINGS[kind])[family]
    if isinstance(architecture, tuple | list):
        architecture = architecture[0]
    config_name = configuration_auto.CONFIG_MAPPING_NAMES[family]
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class or getattr(transformers, config_name)
    default = config_class()
    values = shrunk({k: v for k, v in default.to_dict().items() if k != "dtype"})
    values = merged(values, OWN.get(family, {}))
    if kind == "audio":  # SpecAugment draws by NumPy, and layers are skipped by the value of a draw
        values |= dict.fromkeys(("mask_time_prob", "mask_feature_prob", "layerdrop"), 0.0)
    if kind in ("seq2seq", "speech"):
        values.setdefault("decoder_start_token_id", 0)
    if kind in ("causal", "masked", "multimodal", "seq2seq"):
        batch = TEXT.format(vocabulary=VOCABULARY, length=SEQUENCE)
    elif kind == "image" and model_class.main_input_name == "input_ids":
        batch = CLASSIFIED.format(vocabulary=VOCABULARY, length=SEQUENCE)
    elif kind == "image":
        size = values.get("image_size", IMAGE)
        size = size if isinstance(size, int) else size[0]
        batch = PICTURES.format(channels=values.get("num_channels", 3), image=size)
    else:
        name = model_class.main_input_name
        frames = 2 * values.get("max_source_positions", 32)
        shape = "8000" if name == "input_values" else f"{values.get('num_mel_bins', 80)}, {frames}"
        batch = SOUND.format(name=name, shape=shape)
    path = folder / f"{kind}_{family.replace('-', '_')}.py"
    path.write_text(
        FILE.format(
            architecture=architecture,
            config=config_class.__name__,
            values=json_of(values),
            batch=batch,
        )
    )
    return path, architecture


def merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return values with some replaced, those of parts one by one."""
    found = dict(values)
    for name, value in own.items():
        inner = found.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        found[name] = merged(inner, value) if both else value
    return found


def json_of(values: dict[str, Any]) -> str:
    """Return values as Python text."""
    return repr(json.loads(json.dumps(values, default=lambda each: None)))

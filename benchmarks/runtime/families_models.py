"""Tiny model files of the families of transformers' mappings, for `families`.

A family's own configuration has its sizes shrunk, in parts as well; of its layers so many stay that
each kind is there. The model file is such as a user has.
"""

from __future__ import annotations

import inspect
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

SEQUENCE, VOCABULARY, IMAGE, QUERIES = 16, 64, 32, 4

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
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_FEW_FILTERS = {"num_filters": 2, "hidden_size": 8}
_DOTS3 = {"head_dim": 16}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config": {"codebook_size": 8, "base_channels": 32, "num_res_blocks": 1},
        "audio_config": {
            "codebook_dim": 32,
            "codebook_size": 8,
            "num_filters": 4,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 64,
        },
        "image_token_id": 5,
        "audio_token_id": 6,
        "image_token_offset": 40,
        "audio_token_offset": 48,
    },
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1},
    **{
        name: {
            **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id"), 3),
            "video_token_index": 3,
            "num_query_tokens": QUERIES,
            "text_config": {"word_embed_proj_dim": 32},
        }
        for name in ("blip-2", "instructblip", "instructblipvideo")
    },
    "blt": {
        "use_cache": False,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 4},
        "vq_config": {"base_channels": 32, "num_embeddings": 64},
    },
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
    },
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        "canvas_length": 16,
    },
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
            "full_attention",
            "mlp",
        ],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 2),
    },
    "dots3_note": {
        **_DOTS3,
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 6},
        "vq_config": {"base_channels": 32, "codebook_size": 64, "latent_channels": 8},
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "florence2": {"vision_config": {"embed_dim": [8, 16, 32, 64], "num_heads": [1, 2, 4, 8]}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "deepstack_layer_map": [],
        "downsample_rate": "1/2",
        "spatial_target_layers": [],
    },
    "granite_speech5_ctc": {"encoder_config": {"context_size": 32, "num_key_value_heads": 4}},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "vibevoice": dict.fromkeys(("audio_config", "semantic_model_config"), _FEW_FILTERS),
    "vibevoice_asr": dict.fromkeys(
        ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"), _FEW_FILTERS
    ),
    "hrm_text": {"num_layers_per_stack": 2, "use_cache": False},
    "hunyuan_vl": {
        "text_config": {"head_dim": 8, "rope_parameters": {"mrope_section": [1, 1, 1, 1]}}
    },
    "janus": {"vq_config": {"base_channels": 32, "num_embeddings": 64}},
    "kosmos-2": {
        "latent_query_num": QUERIES,
        "text_config": {"layers": 2, "attention_heads": 4},
    },
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 32, "num_filters": 8}},
    "luke": {"entity_vocab_size": 64},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark": {"projector_hidden_size": 32, "audio_config": {"hidden_sizes": [8, 16, 24, 32]}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"projector_hidden_size": 32, "vision_config": {"max_img_size": 64}},
    "pp_formulanet": {"vision_config": {"decoder_hidden_size": 32, "post_conv_out_channels": 64}},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}}
    },
    "perceiver": {"max_position_embeddings": SEQUENCE},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
    "xlstm": {"mode": "train", "use_cache": False},
    "qwen4_exp": {**_QWEN4, "text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "xmod": {"default_language": "en_XX"},
    "cvt": {"depth": [2, 2, 3], "embed_dim": [32, 48, 96]},
    "neomme": {"head_dim": 16},
    "esmc": {"num_key_value_heads": 4},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), _BY_SECTIONS),
    **dict.fromkeys(("glm4v", "glm_ocr", "paddleocr_vl"), _BY_SECTIONS),
    "glm4v_moe": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "moonshine": {"pad_token_id": 0},
    "xlnet": {"d_head": 8},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
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
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
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

WITH_PICTURES = ("git", "idefics", "kosmos-2", "pp_formulanet", "vision-encoder-decoder")
"""Those that fail without any; the forward of others says so."""

BESIDE: dict[str, dict[str, str]] = {
    "idefics": {
        "pixel_values": "pictures[:, None]",
        "image_attention_mask": f"torch.ones(size, {SEQUENCE}, 1, dtype=torch.long)",
    },
    "instructblipvideo": {
        "pixel_values": f"pictures[:, None].expand(size, 4, 3, {IMAGE}, {IMAGE})"
    },
    "kosmos-2": {
        "image_embeds_position_mask": f"torch.arange({SEQUENCE}).lt({QUERIES}).expand(size, -1)"
    },
    "kyutai_speech_to_text": {"input_ids": f"torch.randint(4, 64, (size, {SEQUENCE}, 33))"},
    "molmo2": {"mm_token_type_ids": "torch.zeros_like(ids)"},
    **{
        name: {
            "input_ids": f"torch.randint(4, {VOCABULARY}, (4 * size, {SEQUENCE}))",
            "labels": f"torch.randint(4, {VOCABULARY}, (size, {SEQUENCE}, 4))",
        }
        for name in ("musicgen", "musicgen_melody")
    },
    "omniasr_ctc": {"padding_mask": "torch.ones(size, 8000, dtype=torch.long)"},
    **{
        name: {"attention_mask": "torch.ones(size, 64, dtype=torch.long)"}
        for name in ("granite_speech5_ctc", "lasr_ctc", "parakeet_ctc")
    },
    "pix2struct": {"flattened_patches": "torch.rand(size, 16, 2 + 3 * 256).mul(8).floor()"},
    "shieldgemma2": {"labels": "ids"},
    "siglip2": {
        "pixel_values": "torch.randn(size, 16, 192)",
        "pixel_attention_mask": "torch.ones(size, 16, dtype=torch.long)",
        "spatial_shapes": "torch.full((size, 2), 4)",
    },
    "voxtral_realtime": {"input_features": f"torch.randn(size, 128, {8 * SEQUENCE})"},
    "udop": {"bbox": f"torch.rand(size, {SEQUENCE}, 4)"},
    **{
        name: {"input_ids": f"torch.cat([torch.full_like(ids[:, :{n}], 3), ids[:, {n}:]], 1)"}
        for name, n in (("blip-2", QUERIES), ("instructblip", QUERIES))
    },
}
"""What batches of single families have beside, or in the place of what others have."""

SOUNDS: dict[str, tuple[str, str]] = {
    "canary": ("input_features", "64, 128"),
    "cohere_asr": ("input_features", "64, 128"),
    "lasr_ctc": ("input_features", "64, 128"),
    "moonshine_streaming": ("input_values", "8000"),
    "omniasr_ctc": ("input_values", "1, 8000"),
    "parakeet_ctc": ("input_features", "64, 80"),
    "seamless_m4t": ("input_features", "64, 160"),
    "seamless_m4t_v2": ("input_features", "64, 160"),
    "speech-encoder-decoder": ("inputs", "8000"),
    "speech_to_text": ("input_features", "64, 80"),
    "wav2vec2-bert": ("input_features", "64, 160"),
    "granite_speech5_ctc": ("input_features", "64, 320"),
}
"""Inputs of those whose configuration does not say them: their name, and the sizes of a sample."""

FILE = '''"""A tiny {architecture} with random weights, as the benchmark `families` makes it."""

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
DESCRIBED = """    ids = torch.randint(4, {vocabulary}, (size, {length}))
    pictures = torch.randn(size, 3, {image}, {image})
    return {{"input_ids": ids, "pixel_values": pictures, "labels": ids, {others}}}"""
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
        elif isinstance(value, dict) and value and all(of_layer(key, layers) for key in value):
            by_layer = {
                int(key): shrunk(each) if isinstance(each, dict) else each
                for key, each in value.items()
            }
            value = {
                place: by_layer[layer] for place, layer in enumerate(kept) if layer in by_layer
            }
        elif name in DEPTHS and isinstance(value, list):
            value = [min(each, 1 if place else 2) for place, each in enumerate(value)]
        elif name == "conv_dim" and isinstance(value, list | tuple):  # of audio
            value = [min(each, 32) for each in value]
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


def of_layer(key: Any, layers: int) -> bool:
    """Whether the key of a table is the number of a layer."""
    return str(key).isdigit() and int(key) < layers


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
    if kind in ("audio", "speech"):
        values = undrawn(values)
    if kind == "causal" and family == "reformer":
        values["is_decoder"] = True
    if kind in ("seq2seq", "speech") or values.get("is_encoder_decoder"):
        for name in ("decoder_start_token_id", "pad_token_id"):
            values[name] = 0 if values.get(name) is None else values[name]
    needed = needs(model_class)
    if kind != "image" and (family in WITH_PICTURES or "pixel_values" in needed):
        vision = values.get("vision_config") or values.get("encoder") or values
        batch = DESCRIBED.format(
            vocabulary=VOCABULARY,
            length=SEQUENCE,
            image=vision.get("image_size", IMAGE),
            others=", ".join(f'"{name}": ids' for name in needed if name.endswith("input_ids")),
        )
    elif family in SOUNDS and kind in ("speech", "audio"):
        name, shape = SOUNDS[family]
        batch = SOUND.format(name=name, shape=shape)
    elif kind in ("causal", "masked", "multimodal", "seq2seq") or (
        kind == "speech" and model_class.main_input_name == "input_ids"
    ):
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
    beside = "".join(f', "{name}": {made}' for name, made in BESIDE.get(family, {}).items())
    batch = batch.removesuffix("}").rstrip(", ") + beside + "}"
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


def undrawn(values: dict[str, Any]) -> dict[str, Any]:
    """Return values without SpecAugment, which draws by NumPy, and without layers that are skipped
    by the value of a draw, in parts as well.
    """
    without: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            without[name] = undrawn(value)
        else:
            is_drawn = str(name).endswith(("mask_time_prob", "mask_feature_prob", "layerdrop"))
            without[name] = 0.0 if is_drawn else value
    return without


def needs(model_class: Any) -> list[str]:
    """Return the names of what a forward can't do without."""
    named = inspect.signature(model_class.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in named
        if each.default is each.empty and each.kind not in kinds and each.name != "self"
    ]


def merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return values with some replaced, those of parts one by one.

    A name may stand for a whole in one mapping, and for its text part alone in another.
    """
    found = dict(values)
    for name, value in own.items():
        if name.endswith("_config") and name not in found:
            continue
        inner = found.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        found[name] = merged(inner, value) if both else value
    return found


def json_of(values: dict[str, Any]) -> str:
    """Return values as Python text."""
    return repr(json.loads(json.dumps(values, default=lambda each: None)))

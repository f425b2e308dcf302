"""An unmodified Hugging Face Llama with grouped-query heads (pip install -e '.[hf]')."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 1024
SEQUENCE = 64


def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def batch(size):
    ids = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}

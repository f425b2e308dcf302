"""An unmodified Hugging Face Llama, built from its configuration: nothing is downloaded.

The numbers are those of Llama 3 8B; planning for it takes no GPU and no weights:

    planner search examples/llama.py --gpus 64 --profile h100-sxm5-80gb --global-batch 512
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128256
SEQUENCE = 8192


def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        rope_theta=500000.0,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def batch(size):
    """Token ids (size, SEQUENCE) that are their own labels: the model shifts them."""
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}

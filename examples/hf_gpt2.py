"""An unmodified Hugging Face GPT-2, its embedding tied to its head (pip install -e '.[hf]')."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 1024
SEQUENCE = 64


def model():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def batch(size):
    ids = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}

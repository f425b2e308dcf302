"""A Hugging Face Llama tuned on text from the safetensors in a folder, its tokens bytes.

This file is both the model and the training script (pip install -e '.[hf]' accelerate):

    python examples/finetune.py base         # a tiny Llama, where yours would be a download
    planner search examples/finetune.py --gpus 2 --global-batch 8
    planner launch --keep run --save-every 20 plan.json examples/finetune.py
    planner convert run tuned && cp base/*config.json tuned     # for from_pretrained("tuned")
"""

import sys

import loop
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BASE = "base"
VOCABULARY, SEQUENCE = 256, 64
STEPS, SAMPLES = 80, 16  # so few that they are learnt by heart


def make_base(folder):
    """Save a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=4 * SEQUENCE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # a head that adapters alone can make much of
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def model():
    """The model of the folder without its values: each rank reads its own part of them."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))


def batch(size):
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}


class Text(torch.utils.data.Dataset):
    """Stretches of the standard library's source; the model shifts the labels itself."""

    def __init__(self):
        self.text = loop.standard_library_text()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        tokens = self.text[index * SEQUENCE : (index + 1) * SEQUENCE].long()
        return {"input_ids": tokens, "labels": tokens}


def main():
    import planner
    import training

    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    engine = planner.apply("plan.json", network, optimizer=optimizer, weights=BASE)
    training.train(engine, optimizer, Text(), STEPS)


if __name__ == "__main__":
    if sys.argv[1:]:
        make_base(sys.argv[1])
    else:
        main()

"""A plain GPT (examples/gpt.py) trained from nothing on text, its tokens bytes.

This file is both the model and the training script:

    planner search examples/pretrain.py --gpus 2 --global-batch 8
    planner launch --keep run --save-every 20 plan.json examples/pretrain.py
    planner convert run weights
    python examples/pretrain.py weights        # the trained model writes on
"""

import sys

import gpt
import loop
import torch

SEQUENCE = 32
STEPS, SAMPLES = 60, 16  # so few that they are learnt by heart

model = gpt.model


def batch(size):
    """(tokens, targets), each (size, SEQUENCE) int64."""
    tokens = torch.randint(gpt.VOCABULARY, (size, SEQUENCE + 1))
    return tokens[:, :-1], tokens[:, 1:]


class Text(torch.utils.data.Dataset):
    """(bytes, the bytes that follow them): stretches of the standard library's source."""

    def __init__(self):
        self.text = loop.standard_library_text()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        first = index * SEQUENCE
        stretch = self.text[first : first + SEQUENCE + 1].long()
        return stretch[:-1], stretch[1:]


def main():
    import planner
    import training

    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    engine = planner.apply("plan.json", network, optimizer=optimizer)
    training.train(engine, optimizer, Text(), STEPS)


def written(folder, text=b"import ", length=40):
    """The text and the likeliest bytes after it, by the weights in a folder."""
    from safetensors.torch import load_file

    network = model()
    network.load_state_dict(load_file(f"{folder}/model.safetensors"))
    tokens = torch.tensor([list(text)])
    for _ in range(length):
        logits = network.logits(tokens[:, -SEQUENCE:])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return bytes(tokens[0].tolist())


if __name__ == "__main__":
    if sys.argv[1:]:
        print(written(sys.argv[1]).decode(errors="replace"))
    else:
        main()

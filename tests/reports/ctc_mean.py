"""CTC: each sample's loss divided by the length of its target, then the mean over samples.

Source: espnet/espnet#3339: the learning curve depends on the number of GPUs, by how the CTC part
is reduced. Right: one process's, or a refusal that names the call of the loss.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Transcription(nn.Module):
    """In a module of its own, as it looks at lengths."""

    def forward(self, log_probs, targets, lengths):
        inputs = torch.full_like(lengths, log_probs.shape[1])
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            targets,
            inputs,
            lengths,
            reduction="mean",
            zero_infinity=True,
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 5)
        self.transcription = Transcription()

    def forward(self, sounds, targets, lengths):
        x = sounds
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.transcription(self.head(x).log_softmax(-1), targets, lengths)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "sounds": torch.randn(size, 9, 6, generator=g).double(),
        "targets": torch.randint(1, 5, (size, 4), generator=g),
        "lengths": torch.tensor([4, 1, 1, 2, 4, 3, 1, 4])[:size],
    }


REFUSED = r"transcription|Transcription|ctc_loss"

"""A student learns a frozen teacher's softened words where an answer is, and the labels there.

Source: neuralmagic/sparseml#592 (and NVIDIA-NeMo/Automodel#3359): "batchmean" divides by samples
what counts tokens. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.token(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Words(3), Words(5)
        self.teacher.requires_grad_(False)

    def forward(self, ids, labels, temperature=2.0):
        student = self.student(ids)
        with torch.no_grad():
            teacher = self.teacher(ids)
        answer = (labels != -100).unsqueeze(-1)
        kl = F.kl_div(
            (student / temperature).log_softmax(-1),
            (teacher / temperature).log_softmax(-1),
            reduction="none",
            log_target=True,
        )
        soft = (kl * answer).sum() * temperature**2 / answer.sum()
        return soft + 0.5 * F.cross_entropy(student.flatten(0, 1), labels.flatten())


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (size, 6), generator=g)
    counts = torch.tensor([6, 1, 0, 2, 5, 1, 6, 3])[:size]
    return {"ids": ids, "labels": ids.masked_fill(torch.arange(6) >= counts[:, None], -100)}

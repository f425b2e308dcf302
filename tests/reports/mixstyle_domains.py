"""Statistics of features are mixed between sample i and i + n/2: the two halves are two domains.

Source: KaiyangZhou/mixstyle-release#19: DataParallel gives each GPU one domain alone. Right: one
process's, or a line that names the halves.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x, y, share):
        x = torch.relu(self.first(x))
        mean, scale = x.mean(2, keepdim=True), x.var(2, keepdim=True).add(1e-5).sqrt()
        one, other = torch.cat([mean, scale], 1).detach().chunk(2)
        swapped = torch.cat([other, one])
        share = share[:, None, None]
        mixed_mean = share * mean + (1 - share) * swapped[:, :6]
        mixed_scale = share * scale + (1 - share) * swapped[:, 6:]
        x = (x - mean) / scale * mixed_scale + mixed_mean
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x.mean(2)), y)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 2, 6, generator=g).double(),
        "y": torch.randint(3, (size,), generator=g),
        "share": torch.rand(size, generator=g).double(),
    }


REFUSED = r"chunk|split|batch|samples"

"""Policy and clipped values over the tokens of answers; advantages are whitened over all of them.

Source: radixark/miles#3229 (and huggingface/trl#2596): each slice of a batch was whitened with its
own mean and variance, without a word. Right: one process's, or a line that names the whitening.
"""

import torch
from torch import nn


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.policy, self.value = nn.Linear(8, 16), nn.Linear(8, 1)

    def forward(self, ids, mask, advantages, old, old_values, returns):
        x = self.token(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        mean = masked_mean(advantages, mask)
        variance = masked_mean((advantages - mean) ** 2, mask)
        advantages = (advantages - mean) * torch.rsqrt(variance + 1e-8)
        log_probs = self.policy(x).log_softmax(-1)
        ratio = (log_probs.gather(-1, ids[..., None]).squeeze(-1) - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        values = self.value(x).squeeze(-1)
        near = old_values + (values - old_values).clamp(-0.2, 0.2)
        worse = torch.max((values - returns) ** 2, (near - returns) ** 2)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return (
            -masked_mean(gain, mask)
            + 0.5 * masked_mean(worse, mask)
            - 0.01 * masked_mean(entropy, mask)
        )


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 6, 2, 1, 5, 6, 1, 3])[:size]
    made = {name: torch.randn(size, 6, generator=g).double() for name in ("a", "v", "r")}
    return {
        "ids": torch.randint(16, (size, 6), generator=g),
        "mask": (torch.arange(6) < lengths[:, None]).double(),
        "advantages": made["a"],
        "old": -2.7 + 0.2 * made["v"],
        "old_values": 0.3 * made["v"],
        "returns": made["r"],
    }


REFUSED = r"sum|mean|rsqrt|computed across samples"

"""The optimizer of checks steps on dense gradients as AdamW does, on sparse ones as SparseAdam."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from planner.runtime.proofs.adam_of_rows import AdamOfRows

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-20}
"""SparseAdam adds `eps` before it takes the bias out, AdamW after: no matter where it is tiny."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).pow(2).sum()


def trained(module: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
    for ids in ([0, 2, 2], [2, 5, 0], [4, 4, 4]):
        module.zero_grad()
        module(torch.tensor(ids)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return module


def test_rows_step_as_sparse_adam_and_the_rest_as_adamw():
    torch.manual_seed(0)
    module = Model().double()
    first = module.table.weight.detach().clone()
    reference = copy.deepcopy(module)
    trained(module, AdamOfRows(module.parameters(), weight_decay=0.1, **SETTINGS))
    trained(
        reference,
        torch.optim.SparseAdam([reference.table.weight], **SETTINGS),
        torch.optim.AdamW(reference.out.parameters(), weight_decay=0.1, **SETTINGS),
    )
    for own, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        # Its counts of steps are float32, as AdamW keeps them.
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)
    # Rows that no batch looked up have neither moved nor decayed.
    assert torch.equal(module.table.weight[[1, 3]], first[[1, 3]])


def test_a_sparse_gradient_is_there_still_after_the_step():
    module = Model()
    module(torch.tensor([1])).backward()
    AdamOfRows(module.parameters()).step()
    assert module.table.weight.grad is not None
    assert module.table.weight.grad.is_sparse


def test_a_table_on_the_device_is_not_counted_as_the_hosts():
    entered = []

    @contextmanager
    def holding():
        entered.append(1)
        yield

    module = Model()
    module(torch.tensor([1])).backward()
    AdamOfRows(module.parameters(), holding=holding).step()
    assert not entered

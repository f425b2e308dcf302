"""A recommender: two tables of ids, too large for one device, and a small tower over their rows.

Search a plan, prove it on as many CPU ranks, and train with it:

    planner search --gpus 4 examples/recommender.py
    planner verify plan.json examples/recommender.py
    planner launch plan.json examples/recommender.py

Where the tables do not fit, each is cut over ranks, by columns or by rows, whichever is faster
(docs/training.md). ROWS is the size of a table. With SPARSE=1 an update changes the rows of its
batch alone (lazy Adam), and tables that do not fit may go to the host's memory, too:

    SPARSE=1 planner search --gpus 4 --offload tables examples/recommender.py
"""

from __future__ import annotations

import os

import planner
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = int(os.environ.get("ROWS", 400_000))
WIDTH = int(os.environ.get("WIDTH", 64))
STEPS = int(os.environ.get("STEPS", 100))
SPARSE = os.environ.get("SPARSE") == "1"
HISTORY = 20


class Recommender(nn.Module):
    """Whether a user takes an item, from the user's id and the items taken before."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=SPARSE)
        self.items = nn.Embedding(ROWS, WIDTH, sparse=SPARSE)
        self.tower = nn.Sequential(
            nn.Linear(3 * WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1)
        )

    def forward(self, user: Tensor, history: Tensor, item: Tensor, taken: Tensor) -> Tensor:
        """The mean loss; user, item and taken are [samples], history is [samples, items]."""
        before = self.items(history).mean(1)
        features = torch.cat([self.users(user), before, self.items(item)], -1)
        return F.binary_cross_entropy_with_logits(self.tower(features).squeeze(-1), taken)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Recommender()


def batch(size: int) -> dict[str, Tensor]:
    """Random ids, low ones more often; an item of an even id is taken."""
    user, item = ((torch.rand(size) ** 2 * ROWS).long() for _ in range(2))
    history = (torch.rand(size, HISTORY) ** 2 * ROWS).long()
    taken = (item % 2 == 0).float()
    return {"user": user, "history": history, "item": item, "taken": taken}


def optimizers(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Lazy Adam for tables with sparse gradients, and Adam for the rest."""
    tables = [param for param in params if planner.has_sparse_gradient(param)]
    others = [param for param in params if not planner.has_sparse_gradient(param)]
    made: list[torch.optim.Optimizer] = [torch.optim.Adam(others, lr=1e-2)] if others else []
    return [*made, torch.optim.SparseAdam(tables, lr=1e-2)] if tables else made


def main() -> None:
    """Train as plan.json says; every rank runs this."""
    engine = planner.apply("plan.json", model, optimizer=optimizers)
    torch.manual_seed(1)  # the same batches on every rank
    for step in range(1, STEPS + 1):
        loss = engine.step(batch(engine.plan.global_batch))
        if step % 10 == 0 and torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()

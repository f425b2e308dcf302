"""What the user's code does wrong while a plan is verified is told as theirs, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from planner.capture import capture_source
from planner.capture.source.model_file import load_model_file
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.users_errors import told_as_users, users_line
from planner.runtime.proofs.verify import compare_with_one_process

FILE = """
import os, torch, torch.nn as nn, torch.nn.functional as F
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        {backward}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, ids, y):
        {forward}
        x = Doubled.apply(self.table(ids))
        return F.cross_entropy(self.out(x), y)
def model():
    {model}
    return Model()
def batch(size):
    ids, y = torch.arange(size), torch.arange(size)
    {batch}
    return dict(ids=ids, y=y)
"""
AS_IT_IS = {"backward": "return grad * 2", "forward": "", "model": "", "batch": ""}

IN_RANKS = "if 'TRAINS' in os.environ:"

CASES = [
    ({"batch": "ids = ids + 7"}, r"model.py:\d+: `x = Doubled.apply\(self.table\(ids\)\)`: Ind"),
    ({"batch": "assert size < 4, 'no more'"}, r"`assert size < 4, 'no more'`: Asser"),
    ({"batch": "if size > 3: exit(1)"}, r"`if size > 3: exit\(1\)`: SystemExit: 1"),
    ({"batch": "if size > 3: ids = ids.to('meta')"}, r"batch\(4\) of model.py has ids on the meta"),
    ({"batch": "y = y if size < 4 else y.half()"}, "the batch tensor y is .*; give int64"),
    ({"model": f"{IN_RANKS} raise OSError('no')"}, "training fails at .* OSError: no"),
    ({"model": f"{IN_RANKS} return None"}, r"model.py: model\(\) returned NoneType in a process"),
    ({"model": "return Model().requires_grad_(False)"}, "no gradient reaches a parameter from"),
    ({"backward": "return grad[:1]"}, "backward of the model fails in .* invalid gradient at ind"),
    ({"backward": "raise KeyError('lost')"}, r"`raise KeyError\('lost'\)`: KeyError: 'lost'"),
    ({"backward": "return grad * float('nan')"}, "gradient of table.weight is NaN in step 1"),
    ({"forward": "assert self.out.weight.dtype == torch.float32"}, "training fails at .*Assertion"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), CASES, ids=[str(next(iter(c))) for c, _ in CASES])
def test_one_line_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], told: str
):
    (tmp_path / "model.py").write_text(FILE.format(**(AS_IT_IS | change)))
    source = load_model_file(tmp_path / "model.py")

    def verify() -> None:
        plan = default_plan(
            capture_source(source), microbatch_size=2, num_microbatches=2, accept=("unknown-ops",)
        )
        monkeypatch.setenv("TRAINS", "1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        compare_with_one_process(plan, source, steps=1)

    with pytest.raises(PlannerError, match=told), told_as_users("model.py", "training"):
        verify()


def test_an_error_of_ours_is_none_of_the_users():
    with pytest.raises(AttributeError) as caught, told_as_users("model.py", "training"):
        default_plan(None)  # type: ignore[arg-type]
    assert users_line(caught.value) is None

"""What a `PlannerTrainer` refuses of its data: a message each, by trainers of one tiny engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from tests.captures import capture_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Stream(IterableDataset):
    """Three samples, of which no batch of four can be made; its length is given."""

    def __iter__(self) -> Any:
        return iter([{"x": torch.ones(4)}] * 3)

    def __len__(self) -> int:
        return 3


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.ones(size, 4)}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer on the CPU, whose engine is made when first needed."""
    from transformers import TrainingArguments

    from planner.integrations.huggingface import PlannerTrainer

    with pytest.MonkeyPatch.context() as patch:
        for module in ("planner.capture", "planner.capture.module"):
            patch.setattr(f"{module}.capture_module", capture_module)
        yield PlannerTrainer(
            Net(),
            TrainingArguments(
                output_dir=str(tmp_path_factory.mktemp("trainer")), use_cpu=True, report_to="none",
                disable_tqdm=True, per_device_train_batch_size=4, max_steps=2,
                dataloader_drop_last=True, save_strategy="no", optim="sgd",
                train_sampling_strategy="sequential",
            ),
            plan=default_plan(
                capture_module(Net(), batch(2), batch(3)), num_microbatches=1, microbatch_size=4
            ),
        )  # fmt: skip
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(max_steps: int) -> Callable[[Any], Any]:
    """Train so many steps on a stream too short for a batch."""

    def call(trainer: Any) -> Any:
        trainer.args.max_steps, trainer.train_dataset = max_steps, Stream()
        return trainer.train()

    return call


REFUSED: dict[str, Callable[[Any], Any]] = {
    "evaluation needs eval_dataset; give one to the trainer or the call": lambda trainer: (
        trainer.evaluate()
    ),
    "training needs train_dataset; give one to the trainer": lambda trainer: (
        trainer.get_train_dataloader()
    ),
    "a stream has no length; give TrainingArguments max_steps": trained(-1),
    "the training data gave no batch; see train_dataset": trained(2),
    "the evaluation's data gave no batch; see eval_dataset": lambda trainer: trainer.evaluate(
        eval_dataset=[]
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_data_that_make_no_batch_are_refused(says, trainer):
    with pytest.raises(PlanError) as refused:
        REFUSED[says](trainer)
    assert str(refused.value) == says

"""N22: a Trainer over the ranks of a plan trains as the Trainer of one process.

In fp64, but for the loss, which the library casts to fp32. By SGD: Adam hides the scale of
gradients.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.builders import SEQUENCE, VOCABULARY, build_hf
from tests.captures import capture_module
from tests.spawn import run_ranks

SAMPLES, BATCH, STEPS = 20, 4, 6  # (a pass has 5 batches, so the sixth is of the second)


class Text(torch.utils.data.Dataset):
    """Sequences of which unlike numbers of labels count."""

    def __init__(self, samples: int = SAMPLES):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (SEQUENCE,), generator=generator)
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def batch(size):
    ids = torch.zeros(size, SEQUENCE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def build() -> Any:
    torch.manual_seed(0)
    return build_hf("LlamaForCausalLM").double()


def plan_of(**layout: Any) -> Plan:
    return default_plan(capture_module(build(), batch(2), batch(3)), **layout)


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.5,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 2,
        "save_strategy": "no",
        "average_tokens_across_devices": False,
    }
    return TrainingArguments(**(settings | changes))


def right(prediction: Any) -> dict[str, float]:
    """A metric of logits and labels."""
    guessed = prediction.predictions[:, :-1].argmax(-1)
    labels = prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"right": float((guessed == labels)[counted].mean())}


def told(trainer: Any) -> list[dict[str, float]]:
    """What was logged, but for times."""
    names = ("loss", "learning_rate", "grad_norm", "eval_loss", "eval_right", "step")
    return [{k: v for k, v in line.items() if k in names} for line in trainer.state.log_history]


def as_rank(folder: Path) -> None:
    """Set what launchers set: the ranks of a test have a group already."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "1"  # nobody listens: the group is there
    os.chdir(folder)


def trained(folder: Path, jobs: list[dict[str, Any]]) -> list[Any]:
    """Train by each plan; return the last values and what was logged."""
    from planner.integrations.huggingface import PlannerTrainer

    as_rank(folder)
    found = []
    for number, job in enumerate(jobs):
        plan, resume = job["plan"], job.get("resume")
        parts = job["replicas"]
        args = arguments(
            folder / job.get("folder", str(number)),
            **({"per_device_train_batch_size": BATCH // parts} | job.get("arguments", {})),
        )
        trainer = PlannerTrainer(
            build(),
            args,
            plan=plan,
            train_dataset=Text(),
            eval_dataset=Text(6),
            compute_metrics=right,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.evaluate()
        if job.get("saves"):
            trainer.save_model(str(folder / "model"))
        found.append((trainer.engine.full_state_dict(), told(trainer)))
        trainer.engine.close()
    return found


def alone(folder: Path, **changes: Any) -> Any:
    from transformers import Trainer

    trainer = Trainer(
        build(),
        arguments(folder, **changes),
        train_dataset=Text(),
        eval_dataset=Text(6),
        compute_metrics=right,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def check(found: Any, expected: Any) -> None:
    state, lines = found
    torch.testing.assert_close(state, dict(expected.model.state_dict()), rtol=1e-5, atol=1e-7)
    whole = told(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in whole]
    for line, other in zip(lines, whole, strict=True):
        assert line == pytest.approx(other, rel=1e-5)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"pp": 2, "num_microbatches": 2, "microbatch_size": 2}),
    (2, {"dp": 2, "num_microbatches": 2, "microbatch_size": 1, "zero_stage": 2}),
    (1, {"tp": 2, "num_microbatches": 2, "microbatch_size": 2}),
]


def test_a_trainer_trains_logs_and_evaluates_as_in_one_process(tmp_path):
    expected = alone(tmp_path / "alone")
    jobs = [
        {"plan": plan_of(**layout), "replicas": replicas, "saves": not number}
        for number, (replicas, layout) in enumerate(LAYOUTS)
    ]
    for found in run_ranks(trained, 2, tmp_path, jobs)[0]:
        check(found, expected)
    saved = type(expected.model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    given = {name: tensor[None] for name, tensor in Text()[7].items()}
    assert saved(**given).loss.item() == pytest.approx(expected.model(**given).loss.item())


def test_an_evaluation_drops_what_fills_no_batch_of_the_trainers(tmp_path):
    """Of six samples the batch of four alone, on one replica or two."""
    changes = {"dataloader_drop_last": True, "max_steps": 1}
    expected = alone(tmp_path / "alone", **changes)
    with_rest = alone(tmp_path / "rest", max_steps=1).evaluate()["eval_loss"]
    assert expected.evaluate()["eval_loss"] != pytest.approx(with_rest, rel=1e-5)
    jobs = []
    for replicas, layout in LAYOUTS[:2]:
        own = {"per_device_eval_batch_size": BATCH // replicas}
        jobs.append({"plan": plan_of(**layout), "replicas": replicas, "arguments": changes | own})
    expected.state.log_history.pop()  # (of the evaluation above)
    for found in run_ranks(trained, 2, tmp_path, jobs)[0]:
        check(found, expected)


def test_batches_of_one_update_are_counted_by_their_tokens(tmp_path):
    changes = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1}
    expected = alone(tmp_path / "alone", **changes)
    replicas, layout = LAYOUTS[1]
    job = {"plan": plan_of(**layout), "replicas": replicas, "arguments": changes}
    check(run_ranks(trained, 2, tmp_path, [job])[0][0], expected)


def test_a_training_goes_on_from_a_checkpoint_under_another_plan(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    changes |= {"logging_steps": 3}  # a log's loss is the mean since the last line, or the start
    expected = alone(tmp_path / "alone", **(changes | {"save_strategy": "no"}))
    (_, first), (replicas, second), _ = LAYOUTS
    jobs: list[dict[str, Any]] = [
        {"plan": plan_of(**first), "replicas": 1, "folder": "run",
         "arguments": changes},
        {"plan": plan_of(**second), "replicas": replicas, "folder": "run", "arguments": changes,
         "resume": str(tmp_path / "run" / "checkpoint-3")},
    ]  # fmt: skip
    whole, resumed = run_ranks(trained, 2, tmp_path, jobs)[0]
    check(whole, expected)
    check(resumed, expected)
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["global_step"] == 6


@pytest.mark.slow
def test_a_training_goes_on_from_the_end_of_a_pass(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": SAMPLES // BATCH, "logging_steps": 100}
    expected = alone(tmp_path / "alone", **(changes | {"save_strategy": "no"}))
    replicas, layout = LAYOUTS[1]
    job = {"plan": plan_of(**layout), "replicas": replicas, "folder": "run", "arguments": changes}
    last = str(tmp_path / "run" / f"checkpoint-{SAMPLES // BATCH}")
    _, resumed = run_ranks(trained, 2, tmp_path, [job, job | {"resume": last}])[0]
    torch.testing.assert_close(resumed[0], dict(expected.model.state_dict()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 3}, "makes batches of 3 and the plan's global batch is 4"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1, which the plan decides"),
        ({"include_num_input_tokens_seen": "all"}, "'all' and no rank reads all of a batch"),
        ({"bf16": True}, "bf16=True and the plan's precision is model"),
        ({"train_sampling_strategy": "group_by_length"}, "sorts samples by length"),
    ],
)
def test_what_the_plan_decides_is_refused(tmp_path, changes, message):
    from planner.integrations.huggingface import PlannerTrainer

    plan = plan_of(num_microbatches=2, microbatch_size=2)
    with pytest.raises(PlanError, match=message):
        PlannerTrainer(
            build(), arguments(tmp_path, **changes), plan=plan, train_dataset=Text()
        ).train()


@pytest.mark.parametrize("name", ["training_step", "_get_train_sampler", "prediction_step"])
def test_methods_that_would_not_be_called_are_refused(tmp_path, name):
    """A sampler of one's own, as for rare classes, would have been left out in silence."""
    from planner.integrations.huggingface import PlannerTrainer

    plan = plan_of(num_microbatches=2, microbatch_size=2)
    own = type("OwnTrainer", (PlannerTrainer,), {name: lambda self, *_: None})
    with pytest.raises(PlanError, match=f"OwnTrainer.{name} would never be called"):
        own(build(), arguments(tmp_path), plan=plan, train_dataset=Text())


def test_a_folder_without_a_training_is_named(tmp_path):
    from planner.integrations.huggingface import PlannerTrainer

    plan = plan_of(num_microbatches=2, microbatch_size=2)
    trainer = PlannerTrainer(build(), arguments(tmp_path), plan=plan, train_dataset=Text())
    with pytest.raises(PlanError, match="has no training of a PlannerTrainer"):
        trainer.train(resume_from_checkpoint=True)

"""M22: a script without edits trains by a plan as in one process, or is refused by its line."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.capture.module import capture_source
from planner.capture.source.model_file import load_model_file
from planner.errors import PlanError
from planner.integrations.script.run import run_unmodified
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.integrations.ordinary_loops import (
    END,
    LOSS_OF_THE_MODEL,
    LOSS_OF_THE_SCRIPT,
    PRELUDE,
    REFUSED,
)
from tests.spawn import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "num_microbatches": 2, "microbatch_size": 4},
    {"dp": 2, "num_microbatches": 2, "microbatch_size": 2, "zero_stage": 1},
    {"dp": 2, "num_microbatches": 1, "microbatch_size": 4},
    {"tp": 2, "num_microbatches": 2, "microbatch_size": 4},
    {"dp": 2, "num_microbatches": 2, "microbatch_size": 2, "zero_stage": 3},
]


@contextmanager
def kept_as_they_are() -> Iterator[None]:
    """Inside, a script may change what is global."""
    dtype, argv, path = torch.get_default_dtype(), sys.argv, list(sys.path)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        sys.argv, sys.path[:] = argv, path


def script(folder: Path, body: str, name: str = "train") -> Path:
    path = folder / f"{name}.py"
    path.write_text(PRELUDE + body + END)
    return path


def plan_for(path: Path, **layout: Any) -> Plan:
    """A plan for what a script trains, by a model file made of it."""
    model_file = path.with_name(f"model_of_{path.stem}.py")
    model_file.write_text(
        f"import planner\nmodel, batch = planner.recorded({str(path)!r}, 'unused')\n"
    )
    with kept_as_they_are():
        return default_plan(capture_source(load_model_file(model_file)), **layout)


def alone(path: Path, out: Path) -> list[float]:
    with kept_as_they_are():
        sys.argv = [str(path), str(out)]
        with suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
    numbers: list[float] = json.loads(out.read_text())
    return numbers


class _Ended(BaseException):
    """What ends a rank in its process."""


def _end() -> None:
    raise _Ended


def ran(jobs: list[tuple[Plan, str, str]]) -> None:
    """Run scripts on the ranks of this test, one after the other."""
    import torch.distributed as dist

    from planner.runtime.process import ended

    ended.end_rank = _end  # type: ignore[assignment]
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    for plan, path, out in jobs:
        with kept_as_they_are():
            try:
                run_unmodified(path, [out], plan)
            except SystemExit:
                assert dist.get_rank() == 0
            except _Ended:
                assert dist.get_rank() > 0
        dist.barrier()


def check(folder: Path, loops: Mapping[str, str], layouts: list[dict[str, Any]]) -> None:
    jobs, expected = [], {}
    for number, (name, body) in enumerate(loops.items()):
        path = script(folder, body, f"train{number}")
        whole = folder / f"{number}.alone"
        for at, layout in enumerate(layouts):
            out = folder / f"{number}-{at}"
            jobs.append((plan_for(path, **layout), str(path), str(out)))
            expected[out] = (name, layout, whole)
        alone(path, whole)
    run_ranks(ran, 2, jobs)
    for out, (name, layout, whole) in expected.items():
        about = f"{name} under {layout}"
        numbers = json.loads(whole.read_text())
        assert numbers, about
        assert json.loads(out.read_text()) == pytest.approx(numbers, rel=1e-9, abs=1e-12), about
        trained, other = (torch.load(f"{path}.pt") for path in (out, whole))
        torch.testing.assert_close(trained, other, rtol=1e-8, atol=1e-10, msg=about)


def test_a_script_trains_as_in_one_process(tmp_path):
    name = "accumulation"
    check(tmp_path, {name: LOSS_OF_THE_MODEL[name]}, LAYOUTS[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_loop_trains_as_in_one_process(tmp_path, layout):
    check(tmp_path, LOSS_OF_THE_MODEL | LOSS_OF_THE_SCRIPT, [layout])


def test_a_script_whose_loss_is_its_own_trains_as_in_one_process(tmp_path):
    names = ("criterion, what it returned, accumulation", "what it returned, written into")
    check(tmp_path, {name: LOSS_OF_THE_SCRIPT[name] for name in names}, LAYOUTS[2:3])


def test_a_script_reads_what_the_model_returned_behind_the_update(tmp_path):
    name = "what it returned, read behind the update"
    check(tmp_path, {name: LOSS_OF_THE_SCRIPT[name]}, LAYOUTS[1:2])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plan:
    """A plan of one rank for the model that all these scripts train."""
    path = script(tmp_path_factory.mktemp("plain"), LOSS_OF_THE_MODEL["plain"])
    return plan_for(path, microbatch_size=8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_taken_over_is_refused_by_its_line(tmp_path, plain, name):
    body, says = REFUSED[name]
    path = script(tmp_path, body)
    with kept_as_they_are(), pytest.raises(PlanError, match=says):
        run_unmodified(str(path), [str(tmp_path / "out")], plain)


SECOND_LOSS = """
a, b = next(iter(loader))
output = model(a)
loss = F.nll_loss(output, b)
loss.backward(retain_graph=True)
(%s).backward()
optimizer.step()
"""


@pytest.mark.parametrize("term", ["output.pow(2).mean()", "loss * 0.5 + output.pow(2).mean()"])
def test_a_second_loss_of_a_call_is_refused(tmp_path, term):
    path = script(tmp_path, SECOND_LOSS % term)
    plan = plan_for(path, microbatch_size=8)
    with kept_as_they_are(), pytest.raises(PlanError, match="beside the loss that the engine tra"):
        run_unmodified(str(path), [str(tmp_path / "out")], plan)


def test_the_plan_of_another_model_is_refused(tmp_path):
    loop = LOSS_OF_THE_MODEL["plain"]
    plan = plan_for(script(tmp_path, loop.replace("model(a, b)", "model(a, b) * 1")))
    wider = script(tmp_path, loop, "wider")
    wider.write_text(wider.read_text().replace("range(3)", "range(4)"))
    with kept_as_they_are(), pytest.raises(PlanError, match="the plan is for"):
        run_unmodified(str(wider), [str(tmp_path / "out")], plan)


def test_a_recorded_model_has_the_script_s_loss_and_batches(tmp_path):
    path = script(tmp_path, LOSS_OF_THE_SCRIPT["criterion"])
    with kept_as_they_are():
        model, batch = planner.recorded(path, "unused")
    made = batch(3)
    assert {name: tuple(t.shape) for name, t in made.items()} == {"x": (3, 6), "target": (3,)}
    assert model()(**{name: t.to("meta") for name, t in made.items()}).shape == ()
    assert not (tmp_path / "unused").exists()

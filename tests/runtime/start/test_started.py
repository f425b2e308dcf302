"""N14, D1: `planner launch` and `planner.apply` where other launchers start the processes.

Each launcher is stood in for by processes with the variables that it sets: what they train is equal
to what one process trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from tests.builders import gpt_batch
from tests.runtime.scenarios import build, capture
from tests.spawn import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS = 3
TRAIN = """
import json, os
from pathlib import Path
import torch
import planner
from tests.builders import PlainGPT, gpt_batch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = PlainGPT()
engine = planner.apply("plan.json", model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
batch = gpt_batch(engine.plan.global_batch)
losses = [engine.step(batch).item() for _ in range(3)]
Path(f"losses-{torch.distributed.get_rank()}").write_text(json.dumps(losses))
"""
LAUNCH = [sys.executable, "-m", "cli", "launch", "--device", "cpu", "plan.json", "train.py"]


def srun(number: int, count: int, port: int, *, on_one_node: bool) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(number),
        "SLURM_STEP_NUM_TASKS": str(count), "SLURM_LOCALID": str(number if on_one_node else 0),
        "SLURM_STEP_TASKS_PER_NODE": str(count) if on_one_node else f"1(x{count})",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


def open_mpi(number: int, count: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
        "MASTER_PORT": str(port),
    }  # fmt: skip


def pod(number: int, count: int, port: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port)}  # fmt: skip


def torch_rank(number: int, count: int, port: int) -> dict[str, str]:
    return pod(number, count, port) | {"LOCAL_RANK": str(number)}


@pytest.mark.parametrize(
    ("command", "variables", "count"),
    [
        pytest.param(LAUNCH, lambda n, c, p: srun(n, c, p, on_one_node=False), 2, id="srun-node"),
        pytest.param(LAUNCH, lambda n, c, p: srun(n, c, p, on_one_node=True), 4, id="srun-rank"),
        pytest.param(LAUNCH, open_mpi, 2, id="mpirun-two-ranks-each"),
        pytest.param(LAUNCH, pod, 2, id="pods"),
        pytest.param(LAUNCH, torch_rank, 4, id="torchrun"),
        pytest.param([sys.executable, "train.py"], torch_rank, 4, id="torchrun-script"),
        pytest.param([sys.executable, "train.py"], open_mpi, 4, id="mpirun-script"),
        pytest.param(
            [sys.executable, "train.py"],
            lambda n, c, p: srun(n, c, p, on_one_node=True),
            4,
            id="srun-script",
        ),
    ],
)
def test_ranks_of_other_launchers_train_as_one_process(tmp_path, command, variables, count):
    plan = default_plan(capture("gpt", torch.float64), dp=2, pp=2, num_microbatches=2)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    port = free_port()
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **quiet, **variables(number, count, port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        told = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, told
    losses = [json.loads((tmp_path / f"losses-{rank}").read_text()) for rank in range(4)]
    for found in losses:
        torch.testing.assert_close(found, losses_alone(plan.global_batch), rtol=1e-10, atol=0)


def losses_alone(global_batch: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    module = build("gpt")[1]
    plan = default_plan(capture("gpt", torch.float64), microbatch_size=global_batch)
    engine = planner.apply(plan, module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2))
    return [engine.step(gpt_batch(global_batch)).item() for _ in range(STEPS)]


def test_processes_that_are_no_ranks_of_the_plan_are_refused(tmp_path):
    plan = default_plan(capture("gpt", torch.float64), dp=2)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    for variables, says in (
        (torch_rank(0, 4, 1), "torchrun started 4 ranks and the plan has 2; start 2"),
        (open_mpi(0, 3, 1), "mpirun started 3 processes and the plan has 2 ranks"),
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(LAUNCH, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert says in done.stderr


def test_a_rendezvous_that_nobody_answers_is_told_within_a_minute(tmp_path):
    """192.0.2.0/24 is for documentation: no machine has it (RFC 5737)."""
    plan = default_plan(capture("gpt", torch.float64), dp=2)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [*LAUNCH[:4], "--num-nodes", "2", "--rendezvous", "192.0.2.7:1234", *LAUNCH[4:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "this node still waits for the others at 192.0.2.7:1234, for 20 s" in done.stderr
    assert "this node can't meet the others at 192.0.2.7:1234: " in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_with_another_plan_are_refused_by_all(tmp_path):
    """Issue 19, 7: else they would wait for messages that the others never send."""
    port = free_port()
    started = []
    for number, num_microbatches in enumerate((2, 4)):
        folder = tmp_path / f"node-{number}"
        folder.mkdir()
        plan = default_plan(capture("gpt", torch.float64), dp=2, num_microbatches=num_microbatches)
        save_plan(plan, folder / "plan.json")
        (folder / "train.py").write_text(TRAIN)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(
                LAUNCH,
                cwd=folder,
                env={**environment, **srun(number, 2, port, on_one_node=False)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2, 2], told
    for text in told:
        assert "planner: the plan is not the same on all nodes: " in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(torch_rank, id="torchrun"),
        pytest.param(lambda n, c, p: srun(n, c, p, on_one_node=True), id="srun-rank"),
        pytest.param(pod, id="pods"),
    ],
)
def test_preflight_under_other_launchers(tmp_path, variables):
    """Issue 19, 7: the first process tells what all found."""
    save_plan(default_plan(capture("gpt", torch.float64), dp=2), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    port = free_port()
    command = [*LAUNCH[:4], "--preflight", "--json", *LAUNCH[4:]]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **quiet, **variables(number, 2, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        told = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    report = json.loads(told[0][0])
    assert report["is_good"]
    assert [(rate["axis"], rate["ranks"]) for rate in report["rates"]] == [("data", [0, 1])]
    assert told[1][0] == ""

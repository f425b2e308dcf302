"""N14, D1: each launcher's variables say where a process stands, and where it meets the others."""

from __future__ import annotations

import time

import pytest

from planner.errors import PlannerError
from planner.nodes.launchers import started
from planner.nodes.waiting import described, waiting_at

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "a", "MASTER_PORT": "1234"}  # fmt: skip
"""Ray Train sets the same."""
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "9",
        "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[03-04,9]-ib"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
            "MASTER_ADDR": "a"}  # fmt: skip
MPICH = {"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8",
         "MASTER_ADDR": "a"}  # fmt: skip
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
POD_OF_MANY = POD | {"WORLD_SIZE": "16", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
"""With `nprocPerNode` WORLD_SIZE counts ranks."""


@pytest.mark.parametrize(
    ("given", "launcher", "place", "meeting"),
    [
        (TORCHRUN, "torchrun", (9, 16, 1, 8), "a:1234"),
        (TORCHRUN | SRUN, "torchrun", (9, 16, 1, 8), "a:1234"),
        (SRUN, "srun", (9, 16, 1, 8), "gpu03-ib:27112"),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}, "srun", (9, 16, 1, 8), "b:7"),
        (OPEN_MPI, "mpirun", (9, 16, 1, 8), "a:29500"),
        (MPICH, "mpirun", (9, 16, 1, 8), "a:29500"),
        (POD, "a PyTorchJob", (1, 2, 0, 1), "job-master-0:23456"),
        (POD_OF_MANY, "a PyTorchJob", (1, 2, 0, 1), "job-master-0:23456"),
    ],
)
def test_launchers_tell_a_process_its_place(given, launcher, place, meeting):
    found = started(given)
    assert found is not None
    assert found.launcher == launcher
    assert (found.number, found.count, found.local_number, found.local_count) == place
    assert found.meeting == meeting
    assert found.is_rank == (launcher == "torchrun")
    assert found.is_node == (launcher == "a PyTorchJob")
    assert found.torch_variables()["LOCAL_RANK"] == str(place[2])


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n7", "n7"), ("n7,n8", "n7"), ("n[7,9]", "n7"), ("rack2-n[007-012]", "rack2-n007"),
     ("r[1-2]n[3-4],x", "r1n3")],
)  # fmt: skip
def test_the_first_of_slurm_s_hosts_is_the_meeting(hosts, first):
    assert started(SRUN | {"SLURM_STEP_NODELIST": hosts}).address == first


@pytest.mark.parametrize(("counts", "is_node"), [("1(x16)", True), ("1", True), ("2(x7),1", False)])
def test_a_task_that_is_alone_on_its_node_starts_the_node_s_ranks(counts, is_node):
    assert started(SRUN | {"SLURM_STEP_TASKS_PER_NODE": counts}).is_node == is_node


def test_steps_of_a_job_meet_at_ports_of_their_own():
    ports = {started(SRUN | {"SLURM_STEP_ID": str(step)}).port for step in range(4)}
    assert len(ports) == 4
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # sbatch's script
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # salloc's shell
    ],
)
def test_a_process_alone_is_no_cluster(given):
    assert started(given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two was given"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 was given"),
        (TORCHRUN | {"MASTER_PORT": "here"}, "MASTER_PORT=here was given"),
        (TORCHRUN | {"RANK": "16"}, "RANK=16 and WORLD_SIZE=16 .* count from 0 to 15"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "torchrun started this .* MASTER_ADDR is not set"),
        (OPEN_MPI | {"MASTER_ADDR": ""}, "mpirun started this process and 16 in all.*-x MASTER"),
    ],
)
def test_a_place_that_is_none_is_told(given, message):
    with pytest.raises(PlannerError, match=message):
        started(given)


def test_mpirun_on_one_machine_needs_no_address():
    local = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16", "MASTER_ADDR": ""}
    assert started(local).meeting == "localhost:29500"


def test_who_waits_says_where_and_who_gives_up_too(capsys):
    def gives_up():
        with waiting_at("127.0.0.1:9", "rank 3", told_after_s=0.01):
            time.sleep(0.1)
            raise TimeoutError("too long\nand more")

    with pytest.raises(
        PlannerError, match=r"rank 3 can't meet the others at 127.0.0.1:9: too long;"
    ):
        gives_up()
    assert "rank 3 still waits for the others at 127.0.0.1:9, for 0 s" in capsys.readouterr().err
    with waiting_at("127.0.0.1:9", "rank 3", told_after_s=0.2):
        pass
    time.sleep(0.3)
    assert not capsys.readouterr().err
    assert described("no.such.host.invalid:9").endswith(
        "(no address is known for no.such.host.invalid)"
    )

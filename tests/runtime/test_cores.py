"""Ranks of one node on cores of their own."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from planner.runtime.process.host.cores import available_cores, near_cores, own_cores, stay_on

PRINT_CORES = "import os; print('cores', os.environ['LOCAL_RANK'], sorted(os.sched_getaffinity(0)))"


def test_ranks_share_out_cores():
    all_cores = {0, 1, 2, 5, 7}
    found = [own_cores(all_cores, peers=[all_cores] * 2, local_rank=r) for r in range(2)]
    assert found == [{0, 1}, {2, 5}]
    # Fewer cores than ranks, or already shared out by a launcher: as they were.
    assert own_cores({0, 1}, peers=[{0, 1}] * 3, local_rank=2) == {0, 1}
    assert own_cores({3}, peers=[{2}, {3}], local_rank=1) == {3}


def test_the_cores_near_a_gpu_are_those_of_its_place_on_the_bus(tmp_path):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    place = tmp_path / "0000:c1:00.0"
    place.mkdir()
    (place / "local_cpulist").write_text("0-2,8,10-11\n")
    assert near_cores(gpu, tmp_path) == {0, 1, 2, 8, 10, 11}
    (place / "local_cpulist").write_text("\n")  # a virtual machine may tell none
    assert near_cores(gpu, tmp_path) == set()
    gpu.pci_bus_id = 7
    assert near_cores(gpu, tmp_path) == set()
    assert near_cores(SimpleNamespace(), tmp_path) == set()
    before = available_cores()
    stay_on(set())
    assert available_cores() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not bound here")
def test_a_launched_rank_stays_on_its_own_cores(tmp_path):
    """So that gloo's socket threads never wait for the other rank's core."""
    script = tmp_path / "script.py"
    script.write_text(PRINT_CORES)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    for local_rank in (0, 1):
        environment = os.environ | {
            "PLANNER_DEVICE": "cpu", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        command = [sys.executable, "-m", "planner.worker", str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        half = len(cores) // 2
        mine = cores[local_rank * half : (local_rank + 1) * half]
        assert done.stdout.split("\n")[0] == f"cores {local_rank} {mine}"

"""Measuring for real: two gloo ranks on this machine, few probes (M2, M16, X7)."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from planner.errors import ProfileError
from profiles import Group, load_profile, measure_profile
from profiles.lookup.op_model import record_key
from profiles.measure import measure as measuring
from profiles.measure import rounds
from profiles.measure.grid import base_probes, standard_grid
from profiles.measure.nodes.launchers import LocalLauncher
from profiles.measure.rounds import _spanning_first
from profiles.measure.signatures import blocks, signatures
from profiles.measure.timing import surroundings
from profiles.measure.workers import ProbeFailed, WorkerGroup
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.profiles.probes import a_few_probes, few_collectives
from tests.spawn import free_port, is_running, until


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "standard_grid", a_few_probes)
        patch.setattr(measuring, "collective_probes", few_collectives)
        patch.setattr(rounds, "VISIT_S", 0.01)
        patch.setattr(rounds, "PASSES", 2)
        patch.setattr(rounds, "MOST_VISITS", 2)
        patch.setattr(surroundings, "STEP_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def two_ranks(small, tmp_path_factory):
    """Return the directory of a small profile of two ranks, and what progress was told."""
    directory, seen = tmp_path_factory.mktemp("profile"), []
    measure_profile(directory, nproc=2, progress=lambda fraction, _: seen.append(fraction))
    return directory, seen


def test_two_ranks_are_measured_into_a_profile_that_loads(two_ranks):
    """M2, M16: every op forward and backward, every collective, memory and optimizer."""
    directory, fractions = two_ranks
    loaded = load_profile(directory)
    assert loaded.file.complete
    assert loaded.file.skipped == ()
    asked = {query.target for probe in a_few_probes("cpu") for query in probe.queries}
    assert asked <= {record.target for record in loaded.ops}
    assert {(r.target, r.direction) for r in loaded.ops} >= {
        (target, direction) for target in asked for direction in ("forward", "backward")
    }
    assert len(loaded.collectives) == 6 * 3
    assert loaded.cluster.devices_per_node == loaded.cluster.max_devices == 2
    # A Python process with torch holds over 100 MB and, empty, under 2 GB.
    assert 1e8 < loaded.context_bytes < 2e9
    assert 0 <= loaded.allocator_overhead_fraction < 1
    assert loaded.optimizer_seconds(param_bytes=4e6, num_tensors=4).source == "adamw, measured"
    assert fractions == sorted(fractions)
    assert all(record.device and record.measured_at for record in loaded.ops)
    record = loaded.collectives[0]
    answer = loaded.collective_seconds(record.kind, record.num_bytes, Group(ranks_per_node=2))
    assert answer.source == "measured"


def test_measuring_again_asks_nothing_twice(two_ranks):
    """X7: a second run finds every record there and keeps it."""
    directory, _ = two_ranks
    first = load_profile(directory)
    again = measure_profile(directory, nproc=2)
    assert (again.ops, again.collectives) == (first.ops, first.collectives)


def test_another_number_of_ranks_is_not_mixed_in(two_ranks):
    directory, _ = two_ranks
    with pytest.raises(ProfileError, match="nproc 2, but here it is 1"):
        measure_profile(directory, nproc=1)
    load_profile(directory)


def test_no_processes_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="nproc=0"):
        measure_profile(tmp_path, nproc=0)


def test_a_rank_without_a_gpu_is_named(tmp_path):
    """D, bad input: one line that says which rank on which host misses which GPU."""
    if torch.cuda.is_available():
        pytest.skip("every rank has a GPU here")
    with pytest.raises(ProfileError, match=r"can't measure on cuda: .*rank 0 on .* needs GPU 0"):
        measure_profile(tmp_path, nproc=1, device="cuda")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="can't write"):
        measure_profile(tmp_path / "file" / "p", nproc=1)


def test_a_task_that_fails_leaves_the_workers_usable():
    with WorkerGroup(LocalLauncher(1, device="cpu", threads=1)) as workers:
        broken = {"op": {"t": "nothing"}, "tensors": []}
        with pytest.raises(ProbeFailed, match="unknown record"):
            workers.call(
                {"task": "op", "libraries": [], "probe": broken, "seconds": 0, "warm": False},
                timeout_s=60,
            )
        assert workers.call({"task": "describe"}, timeout_s=60)[0]["torch"]


def test_a_worker_that_dies_is_named_and_replaced():
    """X7: a crash marks its probe; the next probe gets new workers."""
    with WorkerGroup(LocalLauncher(2, device="cpu", threads=1)) as workers:
        workers.call({"task": "describe"}, timeout_s=60)
        victims = [process.pid for process in workers._processes]
        os.kill(victims[1], signal.SIGKILL)
        with pytest.raises(ProbeFailed, match="signal 9"):
            workers.call({"task": "memory"}, timeout_s=60)
        assert len(workers.call({"task": "describe"}, timeout_s=60)) == 2
        assert all(not is_running(pid) for pid in victims)


def test_a_probe_that_hangs_is_given_up():
    with WorkerGroup(LocalLauncher(1, device="cpu", threads=1)) as workers:
        workers.call({"task": "describe"}, timeout_s=60)
        (stopped,) = (process.pid for process in workers._processes)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(ProbeFailed, match="time limit"):
            workers.call({"task": "memory"}, timeout_s=0.5)
        assert not is_running(stopped)


RUN = """
import sys
from profiles.measure import measure as measuring
from profiles.measure import rounds
from tests.profiles.probes import a_few_probes, few_collectives
measuring.standard_grid, measuring.collective_probes = a_few_probes, few_collectives
rounds.VISIT_S, rounds.PASSES, rounds.MOST_VISITS = 0.01, 2, 2
measuring.measure_profile(sys.argv[1], nproc=1)
"""


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_has_the_same_records(small, tmp_path):
    """X7: real workers, kill -9 after growing times (test_robust.py does it twenty times)."""
    undisturbed = measure_profile(tmp_path / "whole", nproc=1)
    command = [sys.executable, "-c", RUN, str(tmp_path / "killed")]
    for attempt in range(5):
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
        try:
            code = process.wait(timeout=3.0 + 1.5 * attempt)
            assert code == 0
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    resumed = measure_profile(tmp_path / "killed", nproc=1)
    keys = [(record_key(r), r.arguments) for r in resumed.ops]
    assert len(keys) == len(set(keys))
    assert set(keys) == {(record_key(r), r.arguments) for r in undisturbed.ops}
    assert resumed.file.complete


def test_workers_end_when_the_measuring_process_is_killed(tmp_path):
    """No process is left behind by a kill -9."""
    script = (
        "import sys, time\n"
        "from profiles.measure.nodes.launchers import LocalLauncher\n"
        "from profiles.measure.workers import WorkerGroup\n"
        "workers = WorkerGroup(LocalLauncher(1, device='cpu', threads=1))\n"
        "workers.call({'task': 'describe'}, timeout_s=60)\n"
        "print([p.pid for p in workers._processes], flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    (pid,) = json.loads(process.stdout.readline())
    process.stdout.close()
    assert is_running(pid)
    process.kill()
    process.wait()
    until(lambda: not is_running(pid))


def test_a_short_budget_spans_every_target_first():
    ordered = _spanning_first(standard_grid("cpu"))
    targets = {probe.op.target for probe in ordered}
    assert {probe.op.target for probe in ordered[: 3 * len(targets)]} == targets
    assert len(ordered) == len(standard_grid("cpu"))


@pytest.mark.slow
def test_processes_that_a_launcher_started_measure_together(tmp_path):
    """D: one command per rank under torchrun; rank 0 writes, the others serve and end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / "p")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    loaded = load_profile(tmp_path / "p")
    assert loaded.file.conditions["nproc"] == 2
    assert {(r.ranks_per_node, r.num_nodes) for r in loaded.collectives} == {(2, 1)}


@pytest.mark.slow
def test_a_model_is_measured_by_its_signatures_and_its_blocks(tmp_path):
    """X7, M16: as many op records as signatures; whole blocks give a correction near 1."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    measured = measure_profile(tmp_path, nproc=1, models=[graph])
    asked = [*base_probes(), *signatures([graph], num_devices=1), *blocks([graph])]
    assert measured.file.complete
    assert len(measured.ops) == sum(len(probe.queries) for probe in asked)
    for direction in ("forward", "backward"):
        assert 0.3 < measured.block_correction(direction) < 3


@pytest.mark.slow
def test_a_budget_too_short_still_gives_every_kind(two_ranks, tmp_path):
    """One probe of every op and a few sizes of every collective come whatever the budget."""
    directory, _ = two_ranks
    enough = load_profile(directory)
    hurried = measure_profile(tmp_path, nproc=2, budget_s=0.001)
    assert {r.target for r in hurried.ops} == {r.target for r in enough.ops}
    assert {r.kind for r in hurried.collectives} == {r.kind for r in enough.collectives}

"""What goes wrong while measuring: kills, full disks, mixed machines; nothing is lost (X7)."""

import errno
import multiprocessing
import os
import random
import signal

import pytest

from commands.render.profile import describe_profile
from planner.errors import ProfileError
from profiles import load_profile, measure_profile, store
from profiles.measure import measure as measuring
from profiles.measure import rounds
from profiles.measure.grid import collective_probes, standard_grid
from tests.profiles import fake_workers
from tests.profiles.fake_workers import FakeWorkers

KILLS = 20


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Few probes, answered at once; fresh settings of the workers for every test."""

    class Workers(FakeWorkers):
        pass

    monkeypatch.setattr(measuring, "WorkerGroup", Workers)
    monkeypatch.setattr(measuring, "standard_grid", lambda device, **has: standard_grid("cpu")[::5])
    monkeypatch.setattr(
        measuring, "collective_probes", lambda groups, most_bytes: collective_probes(groups)[:18]
    )
    return Workers


def told(profile):
    """Return all that records say but the date."""
    records = (*profile.ops, *profile.collectives)
    return sorted(
        str({k: v for k, v in record.model_dump().items() if k != "measured_at"})
        for record in records
    )


def test_killed_at_twenty_random_moments_it_resumes_to_the_same_records(tmp_path, fake):
    """X7: kill -9 each time; at the end the files say what an undisturbed run's say."""
    undisturbed = measure_profile(tmp_path / "whole", nproc=2)
    fake.pause_s = 0.005
    chance, kills, longest_s = random.Random(0), 0, 0.12
    fork = multiprocessing.get_context("fork")
    while kills < KILLS:
        child = fork.Process(target=measure_profile, args=(tmp_path / "p",), kwargs={"nproc": 2})
        child.start()
        if kills > KILLS // 2 and not store.read_ops(tmp_path / "p"):
            longest_s *= 1.5  # a busy machine, on which nothing was measured yet
        child.join(chance.uniform(0.0, longest_s))
        assert child.exitcode is None, "it ended before it was killed twenty times"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
    assert len(store.read_ops(tmp_path / "p")) > 0, "the kills came before any record"
    resumed = measure_profile(tmp_path / "p", nproc=2)
    assert told(resumed) == told(undisturbed) == told(load_profile(tmp_path / "p"))
    assert resumed.file.complete


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    undisturbed = measure_profile(tmp_path / "whole", nproc=2)
    replace, writes = os.replace, iter(range(10**6))

    def full(source, target):
        if next(writes) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        with pytest.raises(ProfileError, match=r"can't write .*No space left on device; free some"):
            measure_profile(tmp_path / "p", nproc=2)
    assert len(store.read_ops(tmp_path / "p")) > 0
    assert not list((tmp_path / "p").glob("*.tmp"))
    assert told(measure_profile(tmp_path / "p", nproc=2)) == told(undisturbed)


@pytest.fixture
def cluster(fake, monkeypatch):
    """Three nodes of two ranks, of which the last has slow links."""
    fake.hosts = ("a", "a", "b", "b", "c", "c")
    fake.devices = ("test device",) * 6
    fake.slow_host = "c"
    monkeypatch.setattr(
        measuring, "collective_probes", lambda groups, most_bytes: collective_probes(groups)
    )


def test_the_node_with_slow_links_is_named_and_kept(tmp_path, cluster):
    """Issue 19, 1: in the file, in what is printed, and each pair of nodes with its rate."""
    measured = measure_profile(tmp_path, nproc=6)
    rates = {link.nodes: link.bytes_per_s for link in load_profile(tmp_path).file.node_links}
    assert rates == {
        ("a", "b"): pytest.approx(1e9, rel=0.01), ("b", "c"): pytest.approx(5e7, rel=0.01),
        ("a", "c"): pytest.approx(5e7, rel=0.01),
    }  # fmt: skip
    (line,) = [line for line in measured.file.findings if line.startswith("slow node")]
    assert "the links of c to all other nodes: 0.05 GB/s" in line
    assert any(line in str(part) for part in describe_profile(measured))


def test_links_between_nodes_are_measured_however_short_the_budget(tmp_path, cluster):
    """Where they were not, the search took them to be free."""
    measured = measure_profile(tmp_path, nproc=6, budget_s=0.001)
    shapes = {(r.ranks_per_node, r.num_nodes) for r in measured.collectives}
    assert shapes == {(2, 1), (1, 2), (2, 2), (1, 3), (2, 3)}
    assert measured.cluster.inter_node.beta_s_per_byte > 0


def test_links_between_nodes_come_from_pairs_of_nodes_where_nothing_else_was_measured(
    tmp_path, cluster, fake
):
    """A group of all nodes may fail; the slowest pair stands for all."""
    fake.refuses = staticmethod(
        lambda task: (
            task["task"] == "collective" and task["num_bytes"] not in (4 * 2**10, 4 * 2**20)
        )
    )
    measured = measure_profile(tmp_path, nproc=6, budget_s=0.001)
    assert not measured.collectives
    assert 1 / measured.cluster.inter_node.beta_s_per_byte == pytest.approx(5e7, rel=0.01)


def test_several_kinds_of_devices_have_a_section_each(tmp_path, fake):
    """The slowest stands for the cluster; the records of both are kept apart."""
    fake.devices = ("fast device", "slow device")
    measured = measure_profile(tmp_path, nproc=2)
    assert measured.cluster.device == "slow device"
    (other,) = measured.file.other_devices
    assert (other.device, other.num_ranks) == ("fast device", 1)
    fast, slow = (
        {
            (r.target, r.shapes, r.direction, r.arguments): r.seconds
            for r in measured.ops
            if r.device == d
        }
        for d in ("fast device", "slow device")
    )
    assert fast.keys() == slow.keys()
    assert all(slow[key] == pytest.approx(2 * fast[key], rel=1e-3) for key in fast)
    assert any(note.startswith("mixed devices: slow device") for note in measured.file.notes)
    assert any(line.startswith("slow device: rank 1 on host") for line in measured.file.findings)
    loaded = load_profile(tmp_path)
    assert loaded.file == measured.file
    assert any("also 1 x fast device" in str(part) for part in describe_profile(loaded))


def test_a_group_that_cannot_be_formed_is_noted_and_the_rest_is_measured(tmp_path, fake):
    fake.refuses = staticmethod(
        lambda task: task["task"] == "collective" and task["kind"] == "all_to_all"
    )
    measured = measure_profile(tmp_path, nproc=2)
    kinds = {record.kind for record in measured.collectives}
    assert "all_to_all" not in kinds
    assert len(kinds) == 5
    refused = [skip for skip in measured.file.skipped if skip.probe.startswith("all_to_all")]
    assert len(refused) == 3
    assert all("can't be formed" in skip.reason for skip in refused)


def test_uncertain_probes_are_visited_further_and_steady_ones_are_not(tmp_path, fake):
    """One op wavers: it gets more visits than the four that all get, within the limit."""
    plain = fake._answer
    count = iter(range(10**6))

    def wavering(self, task, *rank):
        answer = plain(self, task, *rank)
        if task["task"] == "op" and "layer_norm" in str(task["probe"]):
            for name in ("forward", "backward"):
                answer[name] = [s * (1 + next(count) % 7) for s in answer[name]]
        return answer

    fake._answer = wavering
    measured = measure_profile(tmp_path, nproc=2)
    visits = {record.target: len(record.visits) for record in measured.ops}
    assert visits.pop("aten.layer_norm.default") > rounds.PASSES
    assert set(visits.values()) == {rounds.PASSES}
    assert max(len(record.visits) for record in measured.ops) <= rounds.MOST_VISITS


def test_progress_never_goes_back_and_says_what_is_left(tmp_path):
    seen = []
    measure_profile(
        tmp_path, nproc=2, progress=lambda fraction, doing: seen.append((fraction, doing))
    )
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert any("visits left" in doing for _, doing in seen)


class Clock:
    """Time passes where workers take it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in (measuring, rounds, fake_workers):
        monkeypatch.setattr(module, "time", made)
    return made


def test_a_budget_counts_from_where_the_work_before_began(tmp_path, fake, clock):
    """Models are captured before: of 60 s there are 0.5 left, and few visits."""
    fake.pause_s = 0.005
    began = clock.now_s
    measure_profile(tmp_path, nproc=2, budget_s=60, began=began - 59.5)
    assert clock.now_s - began < 0.5 + 0.2 * 60


def test_what_drifts_is_visited_again_where_there_is_time(tmp_path, fake, clock, monkeypatch):
    again = []
    monkeypatch.setattr(measuring, "measure_again", lambda first, *_: again.append(0) or first)
    measure_profile(tmp_path / "a", nproc=2, budget_s=60, began=clock.now_s - 70)
    assert not again
    measure_profile(tmp_path / "b", nproc=2, budget_s=2)
    assert again


def test_a_budget_is_kept(tmp_path, fake, clock):
    """Half a second is not enough for four visits of each; all the same every op has one."""
    fake.pause_s = 0.005
    began = clock.now_s
    measured = measure_profile(tmp_path, nproc=2, budget_s=0.5)
    assert clock.now_s - began < 2.0
    targets = {probe.forward.target for probe in standard_grid("cpu")[::5]}
    assert targets <= {record.target for record in measured.ops}

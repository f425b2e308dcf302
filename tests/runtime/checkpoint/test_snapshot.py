"""What is small of a run: merged over ranks, and put back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.runtime.checkpoint import snapshot
from planner.runtime.checkpoint.optimizer_state import OptimizerNotes
from planner.runtime.checkpoint.snapshot import Notes, check_extra, restore

CPU = torch.device("cpu")


def notes(**given) -> Notes:
    return Notes(step=3, samples=12, optimizer=OptimizerNotes(), **given)


class Counter:
    """A scheduler, as far as a checkpoint goes."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Streams:
    """Notes what it is given."""

    def restore(self, *given) -> None:
        self.given = given


@pytest.fixture
def _rank_of_two(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


@pytest.fixture(autouse=True)
def _generators_stay():
    held = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(held[0])
    random.setstate(held[1])
    numpy.random.set_state(held[2])


def states(seed: int) -> dict:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return snapshot._generators(CPU)


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def engine(**given) -> SimpleNamespace:
    return SimpleNamespace(mesh=SimpleNamespace(device=CPU), random=None, **given)


def test_notes_of_ranks_are_stored_once():
    merged = notes(streams={0: ["a"]}, generators={0: {"torch": 1}})
    merged.merge(notes(streams={0: ["b"], 2: ["c"]}, generators={1: {"torch": 2}}))
    assert merged.streams == {0: ["a"], 2: ["c"]}
    assert merged.generators == {0: {"torch": 1}, 1: {"torch": 2}}


@pytest.mark.usefixtures("_rank_of_two")
@pytest.mark.parametrize(("ranks", "seed"), [((0, 1), 1), ((0,), 0), ((0, 1, 2), 0)])
def test_a_rank_goes_on_with_its_own_generators_or_of_other_numbers_with_the_first(ranks, seed):
    states(seed)
    expected = drawn()
    kept = notes(generators={rank: states(rank) for rank in ranks}, extra={"sgd": {"count": 5}})
    states(77)
    here, counter = engine(), Counter()
    restore(here, kept, {"sgd": counter})
    assert drawn() == expected
    assert (here.steps, here.samples, counter.count) == (3, 12, 5)


@pytest.mark.usefixtures("_rank_of_two")
def test_streams_go_on_where_the_plan_draws():
    here = engine()
    here.random = Streams()
    restore(here, notes(seed=9, streams={0: ["a"]}), {})
    assert here.random.given == (9, {0: ["a"]}, 3)
    fresh = Streams()
    here.random = fresh
    restore(here, notes(), {})  # saved where no op drew: begins as it is
    assert not hasattr(fresh, "given")


def test_states_beside_a_gpu_are_taken_up_without_it():
    kept = states(1)
    expected = drawn()
    kept["torch"] = [kept["torch"][0], torch.zeros(16, dtype=torch.uint8)]
    states(2)
    snapshot._set_generators(CPU, kept)
    assert drawn() == expected


def test_an_extra_that_can_not_be_loaded_is_refused_by_name():
    kept = notes(extra={"scheduler": {}})
    check_extra({"scheduler": Counter()}, kept)
    with pytest.raises(PlanError, match=r"no extra 'scaler' \(it has scheduler\)"):
        check_extra({"scaler": Counter()}, kept)
    with pytest.raises(PlanError, match="extra 'scheduler' is a int, without state_dict"):
        check_extra({"scheduler": 3}, kept)
    with pytest.raises(PlanError, match=r"\(it has none\)"):
        check_extra({"scaler": Counter()}, notes())


def test_a_version_that_is_not_installed_is_left_out(monkeypatch):
    def version(name):
        raise snapshot.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(snapshot.metadata, "version", version)
    assert snapshot.versions() == {"torch": str(torch.__version__)}

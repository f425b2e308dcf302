"""When a checkpoint of a kept run is due, and what goes on from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from planner.errors import PlanError
from planner.runtime.checkpoint import kept
from planner.runtime.checkpoint.kept import KEEP, SAVE_EVERY, Kept


class Engine:
    """Notes what is saved and loaded."""

    def __init__(self, loads_step: int = 0) -> None:
        self.is_accumulating = False
        self.state = SimpleNamespace(steps=0, mesh=SimpleNamespace(control=None))
        self.saved: list[tuple[int, object]] = []
        self.loaded: list[object] = []
        self._loads_step = loads_step

    def save(self, folder, *, extra):
        self.saved.append((self.state.steps, extra))

    def load(self, folder, *, extra):
        self.loaded.append((folder, extra))
        self.state.steps = self._loads_step
        return SimpleNamespace(step=self._loads_step)


@pytest.fixture
def kept_run(tmp_path, monkeypatch):
    monkeypatch.setenv(KEEP, str(tmp_path / "run"))
    monkeypatch.setenv(SAVE_EVERY, "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return tmp_path / "run"


def test_nothing_is_kept_without_a_launcher_that_keeps(monkeypatch):
    monkeypatch.delenv(KEEP, raising=False)
    engine = Engine()
    run = Kept(engine)
    run.keep(now=False)
    assert run.resume({}) is None
    run.keep(now=False)
    assert (engine.saved, engine.loaded) == ([], [])


def test_each_second_step_is_saved_once_and_none_between_the_batches_of_a_step(kept_run):
    engine, extra = Engine(), {"scheduler": object()}
    run = Kept(engine)
    assert run.resume(extra) is None  # there is no folder yet
    for engine.state.steps in range(1, 6):
        for engine.is_accumulating in (True, False, False):
            run.keep(now=False)
    assert engine.saved == [(2, extra), (4, extra)]


def test_a_run_goes_on_from_its_newest_checkpoint_and_does_not_save_it_again(kept_run):
    (kept_run / "000002-step-4").mkdir(parents=True)
    (kept_run / ".saving-000003").mkdir()  # was killed while it saved
    engine = Engine(loads_step=4)
    run = Kept(engine)
    found = run.resume({})
    assert found.step == 4
    assert engine.loaded == [(kept_run, {})]
    assert not (kept_run / ".saving-000003").exists()
    run.keep(now=False)
    assert engine.saved == []
    engine.state.steps = 6
    run.keep(now=False)
    assert engine.saved == [(6, {})]


def test_keeping_before_resuming_is_refused(kept_run):
    """The run would begin from the first step each time it starts again."""
    with pytest.raises(PlanError, match=r"before engine\.resume\(\).* call engine\.resume\(\)"):
        Kept(Engine()).keep(now=False)


def test_a_folder_that_can_not_be_read_is_told_in_a_line(kept_run, monkeypatch):
    def newest(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    kept_run.mkdir()
    monkeypatch.setattr(kept.folders, "newest_in", newest)
    with pytest.raises(PlanError, match=r"PermissionError: .*Permission denied"):
        Kept(Engine()).resume({})

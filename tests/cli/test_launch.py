"""`planner launch` and `planner verify` end to end, on two gloo ranks of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.capture_cache import load_graph
from planner.plan import save_plan
from planner.plan_defaults import default_plan

TRAIN = """
import json, os, sys
from pathlib import Path
import torch
import planner
sys.path.insert(0, os.getcwd())
import model

torch.manual_seed(0)
network = model.model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
engine = planner.apply("plan.json", network, optimizer=optimizer)
torch.manual_seed(1)
batch = model.batch(4)
rank = os.environ["RANK"]
{before}
losses = [engine.step(batch).item() for _ in range(3)]
Path(f"losses-{{rank}}.json").write_text(json.dumps(losses + sys.argv[1:]))
"""


@pytest.fixture
def folder(planner, write_model, tmp_path) -> Path:
    """An empty folder with model.py and a plan.json of two pipeline stages."""
    path = write_model()
    plan = default_plan(load_graph(path), pp=2, microbatch_size=2, num_microbatches=2)
    save_plan(plan, tmp_path / "plan.json")
    return tmp_path


def start(folder, script):
    """Start `planner launch` as a process of its own, as a shell would."""
    (folder / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-c", "import cli; cli.main()", "launch", "plan.json", "train.py", "x"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_in(folder):
    """Ids of other live processes whose working directory is `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            same = (entry / "cwd").resolve() == folder.resolve()
            if same and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def assert_ends(folder, *, within_s):
    """Wait for the last process that runs in `folder`."""
    deadline = time.monotonic() + within_s
    while processes_in(folder):
        assert time.monotonic() < deadline, f"still running: {processes_in(folder)}"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestLaunch:
    def test_trains_with_equal_losses_on_all_ranks(self, folder):
        """P24, P25: arguments reach the script, and every rank sees the same loss."""
        run = start(folder, TRAIN.format(before=""))
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 0, stderr
        losses = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
        assert losses[0] == losses[1]
        assert losses[0][-1] == "x"
        assert losses[0][0] > losses[0][2]  # it learns

    def test_a_rank_that_raises_ends_the_run(self, folder):
        """G14, G15: one traceback, no process left, within 10 s of the failure."""
        before = """
if rank == "1":
    Path("failed-at").write_text("")
    raise RuntimeError("the disk is on fire")
"""
        run = start(folder, TRAIN.format(before=before))
        _, stderr = run.communicate(timeout=120)
        ended = time.time()
        assert run.returncode == 1
        assert ended - (folder / "failed-at").stat().st_mtime < 10
        assert stderr.count("Traceback") == 1
        assert stderr.count("the disk is on fire") == 2  # the line that raised, and the error
        assert "rank 1" in stderr
        assert_ends(folder, within_s=2)

    def test_a_mistake_found_by_all_ranks_is_told_once(self, folder):
        run = start(folder, TRAIN.format(before="").replace("model.batch(4)", "model.batch(5)"))
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 2
        assert len(stderr.strip().splitlines()) == 1
        assert "5" in stderr

    def test_interrupt_leaves_nothing(self, folder):
        """G15: Ctrl-C."""
        before = "Path(f'ready-{rank}').touch()\nwhile True: engine.step(batch)"
        run = start(folder, TRAIN.format(before=before))
        deadline = time.monotonic() + 120
        while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGINT)
        _, stderr = run.communicate(timeout=20)
        assert run.returncode == 130
        assert "Traceback" not in stderr
        assert_ends(folder, within_s=10)


def test_verify_says_the_same(planner, folder):
    """X13 in short: the verdict, its figures and exit code 0."""
    done = planner("verify", "plan.json", "model.py", "--steps", 2)
    assert done.code == 0, done.stderr
    assert "2 ranks compute the same as one process" in done.stdout

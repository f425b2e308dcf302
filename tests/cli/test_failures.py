"""A mistake of ours: one line that names the command, the stage and the report; exit code 3."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cli

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", "2", "--global-batch", "8")


def test_one_line_names_the_command_the_stage_and_the_report(
    planner, write_model, tmp_path, monkeypatch
):
    """N3: the traceback, the command line and the versions are in the file that it names."""

    def fail(*args, progress, **kwargs):
        progress(0.3, "cutting dp2")
        raise KeyError("no such\nblock")

    monkeypatch.setattr("search.find_plan_once", fail)
    done = planner("search", write_model(), *SEARCH)
    assert (done.code, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("planner: planner search failed while searching, cutting dp2: KeyError")
    assert "Traceback" not in line
    (report,) = (tmp_path / "cache" / "planner" / "errors").iterdir()
    assert line.endswith(str(report))
    text = report.read_text()
    assert "--gpus 2" in text
    assert "torch 2" in text
    assert "Traceback (most recent call last)" in text
    assert text.rstrip().endswith(repr("no such\nblock"))


def test_the_report_goes_where_it_can_be_written(planner, write_model, tmp_path, monkeypatch):
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("search.find_plan_once", lambda *args, **kwargs: 1 / 0)
    model = write_model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file"))
    done = planner("search", model, *SEARCH)
    assert done.code == 3
    assert Path(done.stderr.split()[-1]).parent == tmp_path


def test_a_report_that_cannot_be_written_is_no_second_error(planner, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("commands.render.error_report.write_report", full)
    monkeypatch.setattr("planner.language.plan.load_plan", lambda path: 1 / 0)
    done = planner("show", "plan.json")
    assert done.code == 3
    assert "ZeroDivisionError" in done.stderr
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_not_a_mistake_of_ours(planner, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.language.plan.load_plan", full)
    assert "free some space" in planner("show", "plan.json").complaint


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, EOFError])
def test_an_interrupt_is_130(planner, monkeypatch, interrupt):
    def stop(path):
        raise interrupt

    monkeypatch.setattr("planner.language.plan.load_plan", stop)
    assert planner("show", "plan.json").code == 130


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """`planner profile show NAME | head -c 1`: nothing on stderr."""
    command = [sys.executable, "-m", "cli", "profile", "show", "h100-sxm5-80gb"]
    root = Path(cli.__file__).parent.parent
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root
    ) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 141


VERIFIED = """
import os
import torch

def model():
    if "RANK" in os.environ:
        raise_it()
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten())

def loss(output, batch):
    return output.square().mean()

def batch(size):
    return (torch.randn(size, 4),)

def raise_it():
    {what}
"""


@pytest.mark.parametrize(
    ("what", "says", "code"),
    [
        pytest.param("torch.no_such_thing", "no_such_thing", 2, marks=pytest.mark.slow),
        ("os._exit(7)", "died with exit code 7", 3),
    ],
    ids=["the model's own mistake", "an end"],
)
def test_a_rank_of_verify_that_fails_is_one_line(planner, tmp_path, forked_ranks, what, says, code):
    """N3: nothing but that line, whichever rank fails and however."""
    from planner.capture.source.capture_cache import load_graph
    from planner.language.lowering.defaults import default_plan
    from planner.language.plan import save_plan

    path = tmp_path / "model.py"
    path.write_text(VERIFIED.format(what=what))
    save_plan(default_plan(load_graph(path), file="model.py"), tmp_path / "plan.json")
    done = planner("verify", "plan.json", "model.py", "--device", "cpu", "--steps", 1)
    assert done.code == code, done.stderr
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_rank_that_the_kernel_ends_is_no_mistake_of_ours(planner, tmp_path):
    """One line says who ends a process so; there is nothing to report."""
    from planner.capture.source.capture_cache import load_graph
    from planner.language.lowering.defaults import default_plan
    from planner.language.plan import save_plan

    path = tmp_path / "model.py"
    path.write_text(VERIFIED.format(what=f"os.kill(os.getpid(), {int(signal.SIGKILL)})"))
    save_plan(default_plan(load_graph(path), file="model.py"), tmp_path / "plan.json")
    done = planner("verify", "plan.json", "model.py", "--device", "cpu", "--steps", 1)
    assert done.code == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("planner: rank 0 was ended by SIGKILL: by the kernel")


@pytest.mark.parametrize(
    ("args", "number", "leaves"),
    [
        (["--verify", "request"], signal.SIGTERM, "SystemExit(143)"),
        (["--verify", "request"], signal.SIGINT, "KeyboardInterrupt()"),
        (["train.py"], signal.SIGTERM, "143"),
    ],
)
def test_a_command_that_is_told_to_end_ends_as_without_ranks(monkeypatch, args, number, leaves):
    """The code of a script's run is returned; a proof has none, and no answer to go on with."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from planner.runtime.start.workers import run_workers

    def told(*_, **__):
        raise SignalException("told to end", number)

    monkeypatch.setattr("planner.runtime.start.agent.run_agent", told)
    try:
        left = run_workers(args, num_ranks=1, device="cpu")
    except (KeyboardInterrupt, SystemExit) as error:
        left = error
    assert repr(left) == leaves

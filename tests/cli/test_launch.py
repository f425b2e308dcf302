"""`planner launch` and `planner verify` end to end, on two gloo ranks of this machine.

M22 and P13: an ordinary script with a plan file.

What happens when ranks fail or are interrupted is tested beside the launcher.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import launch as launch_command
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.runtime.preflight import BETWEEN_NODES, Exchange
from profiles import Group, load_profile
from tests.spawn import is_running

TRAIN = """
import json, os, sys
from pathlib import Path
import torch
import model
import planner

torch.manual_seed(int(os.environ["RANK"]))  # the engine must make the ranks' weights agree
network = model.model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
engine = planner.apply("not-the-launched.json", network, optimizer=optimizer)
torch.manual_seed(1)
batch = model.batch(4)
rank = os.environ["RANK"]
Path(f"pid-{rank}").write_text(str(os.getpid()))
losses = [engine.step(batch).item() for _ in range(3)]
Path(f"losses-{rank}.json").write_text(json.dumps(losses + sys.argv[1:]))
"""


@pytest.fixture
def folder(planner, write_model, tmp_path) -> Path:
    """An empty folder with model.py and a plan.json of two pipeline stages."""
    path = write_model()
    plan = default_plan(load_graph(path), pp=2, microbatch_size=2, num_microbatches=2)
    save_plan(plan, tmp_path / "plan.json")
    return tmp_path


def test_trains_with_equal_losses_on_all_ranks(folder, planner):
    """P24, P25, P30: arguments reach the script, and every rank sees the same loss.

    No rank is left when the command has ended (G15). The plan is the one that is launched,
    whatever file the script names.

    What it recorded makes one trace with a process for each rank, and stands beside the
    prediction.
    """
    (folder / "train.py").write_text(TRAIN)
    command = ["launch", "--timeline", "run", "plan.json", "train.py", "x"]
    run = subprocess.run(  # as a shell would
        [sys.executable, "-c", "import cli; cli.main()", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert re.search(r"planner compare plan.json \S+ run", run.stdout)  # what to type next
    assert not [rank for rank in (0, 1) if is_running(int((folder / f"pid-{rank}").read_text()))]
    losses = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
    assert losses[0] == losses[1]
    assert losses[0][-1] == "x"
    assert losses[0][0] > losses[0][2]  # it learns
    assert planner("timeline", "run", "--trace", "trace.json").code == 0
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    compared = planner(
        "compare",
        "plan.json",
        "model.py",
        "run",
        "--profile",
        "h100-sxm5-80gb",
        "--trace",
        "t.json",
    )
    assert compared.code == 0, compared.stderr
    assert "step" in compared.stdout
    both = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in both}) == 4  # two predicted, two measured


MISTAKEN = """
from planner.errors import PlannerError
raise PlannerError("the batch has 5 samples; the plan's microbatches take 2 to 4; give as many")
"""


@pytest.mark.parametrize(
    "script",
    [
        MISTAKEN,
        pytest.param(TRAIN.replace("model.batch(4)", "model.batch(5)"), marks=pytest.mark.slow),
    ],
    ids=["raised", "by the engine"],
)
def test_a_mistake_found_by_all_ranks_is_told_once(folder, planner, forked_ranks, script):
    """What the engine says of a batch is shown in `tests/runtime`."""
    (folder / "train.py").write_text(script)
    told = planner("launch", "plan.json", "train.py").complaint
    assert re.search(r"the batch has 5 samples; .* take 2 to 4; give", told)


@pytest.mark.slow
def test_verify_says_the_same(planner, folder):
    """X13 in short: the verdict, its figures and exit code 0."""
    done = planner("verify", "plan.json", "model.py", "--steps", 2)
    assert done.code == 0, done.stderr
    assert "2 ranks compute the same as one process" in done.stdout


def test_verify_by_block_needs_no_ranks(planner, folder):
    """N6 in short: the parts, what is left open, and exit code 0."""
    done = planner("verify", "--by-block", "plan.json", "model.py")
    assert done.code == 0, done.stderr
    assert "plan of 2 ranks: every part" in done.stdout
    assert "not proven: the whole step in numbers" in done.stdout


def test_preflight_compares_with_the_exchanges_that_the_plan_was_priced_with(folder):
    """By ranks and bytes of the whole tensor: what the profile answers of each."""
    planned, note = launch_command._planned_rates(folder / "plan.json", "h100-sxm5-80gb", None)
    assert (planned.source, note) == ("h100-sxm5-80gb", "")
    for axis, group in (
        ("pp", Group(ranks_per_node=2)),
        (BETWEEN_NODES, Group(ranks_per_node=1, num_nodes=2)),
    ):
        exchange = Exchange(axis=axis, kind="send_recv", ranks=(0, 1))
        for num_bytes in (2**16, 2**24):
            answer = load_profile(planned.source).collective_seconds("send_recv", num_bytes, group)
            assert planned.seconds(exchange, num_bytes) == answer.seconds


def test_preflight_checks_and_trains_nothing(folder, planner, forked_ranks):
    """Issue 19, 7: on this machine's two ranks; --json has what the table shows, and the rates."""
    (folder / "train.py").write_text("open('trained', 'w')")
    run = planner("launch", "--preflight", "--json", "plan.json", "train.py")
    assert run.code == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    assert told["is_good"]
    assert told["problems"] == []
    names = [check["name"] for check in told["checks"]]
    assert names[:5] == [
        "nodes", "versions and files", "ranks", "each rank to each rank", "clocks"
    ]  # fmt: skip
    (rate,) = told["rates"]
    assert (rate["axis"], rate["kind"], rate["ranks"]) == ("pp", "send_recv", [0, 1])
    assert rate["num_bytes"] >= 65536
    assert 0 < rate["seconds"] < 10
    assert not (folder / "trained").exists()


def test_preflight_of_what_can_not_run_tells_it(folder, planner):
    """Bad input of a lone node: in one line, with code 2; no rank is started."""
    (folder / "train.py").write_text("def broken(:")
    run = planner("launch", "--preflight", "plan.json", "train.py")
    assert run.complaint.startswith("planner: script train.py is not Python in line 1")
    assert run.stdout == ""

"""Issue 19, 1 and 7: nodes with a network between them (`tests.nodes`), two processes each."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from costmodel import estimate
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from profiles import load_profile
from profiles.store import OPS_FILE
from search import SearchRequest, find_plan_once
from tests.nodes import Nodes, why_no_delay, why_not
from tests.runtime.scenarios import capture
from tests.runtime.start.test_started import TRAIN, losses_alone
from tests.spawn import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
NEEDS_DELAY = pytest.mark.skipif(bool(why_no_delay()), reason=why_no_delay())

PORT = "29511"
WHERE = """
import os, pathlib, socket
pathlib.Path(f"host-{os.environ['RANK']}").write_text(socket.gethostname())
"""
PREFLIGHT = """
import json, sys
from pathlib import Path
from planner.runtime.preflight import PlannedRates, preflight

rate = float(sys.argv[2])  # bytes per second that every exchange is planned to have
planned = PlannedRates(source="here", seconds=lambda exchange, num_bytes: num_bytes / rate)
report = preflight(
    Path("plan.json"), Path("train.py"), "cpu", num_nodes=int(sys.argv[1]),
    rendezvous="node-a:29511", planned=planned, meet_s=float(sys.argv[3]),
)
print(json.dumps(report.to_dict()))
sys.exit(2 if report.problems else 0)
"""


def write_run(folder, *, per_node=2, **sizes):
    """A plan for nodes of two, and a script."""
    plan = default_plan(capture("gpt", torch.float64), **sizes)
    cluster = plan.cluster.model_copy(update={"devices_per_node": per_node})
    save_plan(plan.model_copy(update={"cluster": cluster}), folder / "plan.json")
    (folder / "train.py").write_text(TRAIN)
    return plan


def command(count, *options):
    return [
        sys.executable, "-m", "cli", "launch", "--device", "cpu", "--num-nodes", str(count),
        "--rendezvous", f"node-a:{PORT}", *options, "plan.json", "train.py",
    ]  # fmt: skip


def launch(nodes, folder, *, options=(), variables=None):
    started = command(len(nodes.names), *options)
    return {
        name: nodes.start(name, started, folder=folder, variables=variables) for name in nodes.names
    }


def preflight(nodes, folder, *, rate=1e3, meet_s=60, variables=None, names=None):
    """Start preflight on all nodes (or some); return codes, and the report of each."""
    command = [sys.executable, "-c", PREFLIGHT, str(len(nodes.names)), str(rate), str(meet_s)]
    started = {
        name: nodes.start(name, command, folder=folder, variables=(variables or {}).get(name))
        for name in names or nodes.names
    }
    told = {name: process.communicate(timeout=200) for name, process in started.items()}
    codes = {name: process.returncode for name, process in started.items()}
    return codes, {n: json.loads(out) if out.strip() else err for n, (out, err) in told.items()}


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, {"dp": 2, "pp": 2}), (2, {"tp": 2, "dp": 2}), (4, {"dp": 4, "pp": 2, "zero_stage": 2})],
)
@pytest.mark.parametrize("is_bad", [False, pytest.param(True, marks=NEEDS_DELAY)])
def test_nodes_train_as_one_process(tmp_path, count, sizes, is_bad):
    """With good links, and where one of them is long and loses a frame in a hundred."""
    plan = write_run(tmp_path, num_microbatches=2, **sizes)
    with Nodes(count) as nodes:
        if is_bad:
            nodes.delay("node-b", 0.02, loss=0.01)
        started = launch(nodes, tmp_path)
        told = [process.communicate(timeout=250)[1] for process in started.values()]
        assert [process.returncode for process in started.values()] == [0] * count, told
    alone = losses_alone(plan.global_batch)
    for rank in range(2 * count):
        losses = json.loads((tmp_path / f"losses-{rank}").read_text())
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)


@pytest.mark.parametrize("options", [(), ("--keep", "kept")])
def test_unlike_nodes_start_the_ranks_of_their_group(tmp_path, options):
    """The node with the first two of three ranks is the last by name."""
    plan = default_plan(capture("gpt", torch.float64), dp=3, num_microbatches=2)
    stages = tuple(s.model_copy(update={"device_group": "large+small"}) for s in plan.stages)
    cluster = plan.cluster.model_copy(
        update={"devices_per_node": 1, "nodes": (("large", 2, 1), ("small", 1, 1))}
    )
    plan = plan.model_copy(update={"stages": stages, "cluster": cluster})
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN + WHERE)
    with Nodes(2) as nodes:
        started = [
            nodes.start(name, command(2, "--node-rank", str(at), *options), folder=tmp_path)
            for at, name in enumerate(reversed(nodes.names))
        ]
        told = [process.communicate(timeout=250)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], told
    alone = losses_alone(plan.global_batch)
    for rank, host in enumerate(["node-b", "node-b", "node-a"]):
        losses = json.loads((tmp_path / f"losses-{rank}").read_text())
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)
        assert (tmp_path / f"host-{rank}").read_text() == host


def test_preflight_of_good_nodes(tmp_path):
    write_run(tmp_path, dp=2, pp=2)
    with Nodes(2) as nodes:
        codes, reports = preflight(nodes, tmp_path)
    assert codes == {"node-a": 0, "node-b": 0}, reports
    first = reports["node-a"]
    assert first["checks"] == reports["node-b"]["checks"]
    assert first["nodes"] == ["node-a", "node-b"]
    axes = {(rate["axis"], *rate["ranks"]): rate["nodes"] for rate in first["rates"]}
    assert axes == {
        ("data", 0, 1): ["node-a"], ("data", 2, 3): ["node-b"],
        ("pp", 0, 2): ["node-a", "node-b"], ("pp", 1, 3): ["node-a", "node-b"],
        ("nodes", 0, 2): ["node-a", "node-b"],
    }  # fmt: skip
    assert first["checks_s"] < 30


def test_preflight_names_the_node_with_the_slow_link(tmp_path):
    """10 Mbit/s, where the plan counts on 10 MB/s: all groups over that link, and the node."""
    write_run(tmp_path, dp=3, pp=1, per_node=1)
    with Nodes(3) as nodes:
        nodes.limit_rate("node-b", "10mbit")
        codes, reports = preflight(nodes, tmp_path, rate=1e7)
    assert set(codes.values()) == {2}
    told = reports["node-a"]["problems"]
    assert any(line.startswith("slow data group, ranks 0, 1, 2 on node-a") for line in told), told
    (line,) = [line for line in told if "to other nodes" in line]
    assert line.startswith("all links of node-b to other nodes are slow: send_recv of")
    assert "0.01 GB/s planned" in line


def test_preflight_names_pairs_that_do_not_reach_each_other(tmp_path):
    write_run(tmp_path, dp=3, per_node=1)
    with Nodes(3) as nodes:
        nodes.block("node-b", "node-c")
        codes, reports = preflight(nodes, tmp_path)
    assert set(codes.values()) == {2}
    told = reports["node-a"]["problems"]
    assert [line.split(", rank")[0] for line in told if "does not reach" in line] == [
        "node-b (10.77.0.2) does not reach node-c (10.77.0.3)",
        "node-c (10.77.0.3) does not reach node-b (10.77.0.2)",
    ]


def test_preflight_names_files_that_differ(tmp_path):
    """Each node has its folder; node-b has another script, and no rank is stopped by that."""
    write_run(tmp_path, dp=2, per_node=1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "plan.json").write_bytes((tmp_path / "plan.json").read_bytes())
    (other / "train.py").write_text("another script = 1".replace(" script", "_script"))
    command = [sys.executable, "-c", PREFLIGHT, "2", "1e3", "60"]
    with Nodes(2) as nodes:
        started = [
            nodes.start(name, command, folder=folder)
            for name, folder in (("node-a", tmp_path), ("node-b", other))
        ]
        outputs = [process.communicate(timeout=200) for process in started]
    report = json.loads(outputs[0][0])
    (line,) = report["problems"]
    assert line.startswith("the script train.py is not the same on all nodes: ")
    assert line.endswith(" on node-b")
    assert "data groups, all_reduce" in [check["name"] for check in report["checks"]]


def test_preflight_says_who_did_not_come(tmp_path):
    write_run(tmp_path, dp=2, per_node=1)
    began = time.monotonic()
    with Nodes(2) as nodes:
        codes, reports = preflight(nodes, tmp_path, meet_s=5, names=["node-a"])
    assert codes["node-a"] == 1  # (a script's own exception: the command makes a line of it)
    assert "PlannerError: 1 of 2 have come (node-a; not number 1) after 5 s" in reports["node-a"]
    assert time.monotonic() - began < 40


def test_a_name_that_stands_for_the_loopback_is_named(tmp_path):
    """What Debian's installer writes: gloo then takes an address that other nodes can't reach."""
    write_run(tmp_path, dp=2, per_node=1)
    with Nodes(2) as nodes:
        interface = {"node-b": {"GLOO_SOCKET_IFNAME": "lo"}}
        _, reports = preflight(nodes, tmp_path, variables=interface)
    told = "\n".join(reports["node-a"]["problems"])
    assert "node-a (10.77.0.1) does not reach node-b (127.0.0.1)" in told
    assert "node-b gives an address that only it can reach" in told


@NEEDS_DELAY
def test_preflight_names_the_node_with_the_long_delay(tmp_path):
    write_run(tmp_path, dp=3, per_node=1)
    with Nodes(3) as nodes:
        nodes.delay("node-c", 0.08, loss=0.01)
        _, reports = preflight(nodes, tmp_path, rate=1e7)
    told = "\n".join(reports["node-a"]["problems"])
    assert "all links of node-c to other nodes are slow" in told


def test_nodes_whose_own_names_stand_for_their_loopback_train_and_are_measured(tmp_path):
    """As some installers write /etc/hosts: gloo alone would tell others the loopback."""
    plan = write_run(tmp_path, dp=2, pp=2, num_microbatches=2)
    with Nodes(2, names_itself=False) as nodes:
        started = launch(nodes, tmp_path)
        told = [process.communicate(timeout=250)[1] for process in started.values()]
        assert [process.returncode for process in started.values()] == [0, 0], told
        _, reports = preflight(nodes, tmp_path)
        assert not [line for line in reports["node-a"]["problems"] if "does not reach" in line]
        profile(nodes, tmp_path, per_node=1, out="profile")
    alone = losses_alone(plan.global_batch)
    for rank in range(4):
        losses = json.loads((tmp_path / f"losses-{rank}").read_text())
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)
    assert load_profile(tmp_path / "profile").collectives


ENDLESS = """
from pathlib import Path
import torch
import planner
from tests.builders import PlainGPT, gpt_batch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = PlainGPT()
engine = planner.apply("plan.json", model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
batch = gpt_batch(engine.plan.global_batch)
for step in range(1_000_000):
    engine.step(batch)
    if step == 3:
        Path(f"trains-{torch.distributed.get_rank()}").touch()
"""


def test_a_node_cut_off_in_a_step_ends_the_run_by_name(tmp_path):
    """The other node names it, and it names the one where all meet; both within a minute."""
    write_run(tmp_path, dp=2, pp=2, num_microbatches=2)
    (tmp_path / "train.py").write_text(ENDLESS)
    with Nodes(2) as nodes:
        started = launch(nodes, tmp_path)
        until(lambda: len(list(tmp_path.glob("trains-*"))) == 4, each_s=0.2)
        nodes.cut("node-b")
        cut = time.monotonic()
        told = {name: process.communicate(timeout=60)[1] for name, process in started.items()}
        took_s = time.monotonic() - cut
    assert {name: process.returncode for name, process in started.items()} == {
        "node-a": 1, "node-b": 2
    }  # fmt: skip
    assert took_s < 60
    assert "planner: node-b gave no sign for 30 s" in told["node-a"]
    assert "lost the one that all meet at, node-a:29511 (address 10.77.0.1)" in told["node-b"]


def profile(nodes, folder, *, per_node, out):
    """Run `planner profile` on all nodes within a short budget; return what node-a prints."""
    command = [
        sys.executable, "-m", "cli", "profile", "--device", "cpu", "--nproc", str(per_node),
        "--num-nodes", str(len(nodes.names)), "--rendezvous", f"node-a:{PORT}",
        "--budget", "5s", "--out", out,
    ]  # fmt: skip
    started = [nodes.start(name, command, folder=folder) for name in nodes.names]
    told = [process.communicate(timeout=450) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), told
    return told[0][0]


@pytest.mark.timeout(500)
def test_a_profile_names_the_node_with_the_slow_link(tmp_path):
    with Nodes(3) as nodes:
        nodes.limit_rate("node-b", "100mbit")
        printed = profile(nodes, tmp_path, per_node=1, out="profile")
    kept = load_profile(tmp_path / "profile").file
    (line,) = [line for line in kept.findings if "links of" in line]
    assert line.startswith("slow node: the links of node-b to all other nodes: ")
    assert line in printed
    rates = {frozenset(link.nodes): link.bytes_per_s for link in kept.node_links}
    assert len(rates) == 3
    for pair, rate in rates.items():
        assert (rate < 0.02e9) == ("node-b" in pair)  # 100 Mbit/s are 0.0125 GB/s


@NEEDS_DELAY
@pytest.mark.timeout(500)
def test_a_profile_names_the_node_with_the_long_delay(tmp_path):
    with Nodes(3) as nodes:
        nodes.delay("node-b", 0.02, loss=0.01)
        printed = profile(nodes, tmp_path, per_node=1, out="profile")
    kept = load_profile(tmp_path / "profile").file
    (line,) = [line for line in kept.findings if "links of" in line]
    assert line.startswith("slow node: the links of node-b to all other nodes: ")
    assert line in printed
    assert len(kept.node_links) == 3
    for link in kept.node_links:
        # Half of the way there and back, of which half is delayed.
        assert (link.latency_s > 0.008) == ("node-b" in link.nodes)


@pytest.mark.parametrize("bad", ["slow", pytest.param("long", marks=NEEDS_DELAY)])
@pytest.mark.timeout(500)
def test_a_search_lays_no_tp_over_a_bad_link(tmp_path, bad):
    """Two nodes of two: the best plan keeps tp inside them; tp over both is priced by the link."""
    with Nodes(2) as nodes:
        if bad == "slow":
            nodes.limit_rate("node-b", "500mbit")
        else:
            nodes.delay("node-b", 0.005, loss=0.01)
        profile(nodes, tmp_path, per_node=2, out="profile")
    measured = load_profile(tmp_path / "profile")
    assert measured.cluster.devices_per_node == 2
    graph = capture("gpt")
    best = find_plan_once(graph, measured, SearchRequest(num_devices=4, global_batch=8)).plan
    assert best is not None
    assert best.tp * best.cp <= 2
    over = default_plan(graph, tp=4, microbatch_size=8, num_microbatches=1)
    assert estimate(graph, measured, over).step_s > 2 * best.estimate["step_s"]


@pytest.mark.timeout(500)
def test_a_node_cut_off_while_it_is_measured_ends_the_profile_by_name(tmp_path):
    """Both nodes end within a minute; what was measured is kept."""
    command = [
        sys.executable, "-m", "cli", "profile", "--device", "cpu", "--nproc", "1", "--num-nodes",
        "2", "--rendezvous", f"node-a:{PORT}", "--budget", "5m", "--out", "profile",
    ]  # fmt: skip
    with Nodes(2) as nodes:
        started = {name: nodes.start(name, command, folder=tmp_path) for name in nodes.names}
        # All ranks have come and said what they are; the first measurements run.
        until((tmp_path / "profile" / OPS_FILE).exists, each_s=0.2)
        time.sleep(3)
        nodes.cut("node-b")
        cut = time.monotonic()
        told = {name: process.communicate(timeout=90)[1] for name, process in started.items()}
        took_s = time.monotonic() - cut
    assert took_s < 60
    assert {name: process.returncode for name, process in started.items()} == {
        "node-a": 2, "node-b": 2
    }  # fmt: skip
    assert "node-b gave no sign for 30 s: the measurement ends" in told["node-a"]
    assert "node-b has lost the node that measures, node-a:" in told["node-b"]
    assert (tmp_path / "profile" / OPS_FILE).exists()


@pytest.mark.timeout(500)
def test_a_node_cut_off_in_preflight_is_named(tmp_path):
    """While ranks check: both nodes end within a minute."""
    write_run(tmp_path, dp=2, per_node=1)
    command = [sys.executable, "-c", TOLD_WHEN_WAITING + PREFLIGHT, "2", "1e3", "60"]
    with Nodes(2) as nodes:
        # 128 MiB take a quarter of an hour there and back: the checks last.
        nodes.limit_rate("node-b", "2mbit")
        started = {name: nodes.start(name, command, folder=tmp_path) for name in nodes.names}
        until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, each_s=0.2)
        nodes.cut("node-b")
        cut = time.monotonic()
        told = {name: process.communicate(timeout=90)[0] for name, process in started.items()}
        took_s = time.monotonic() - cut
    assert took_s < 60
    assert {name: process.returncode for name, process in started.items()} == {
        "node-a": 2, "node-b": 2
    }  # fmt: skip
    assert "node-b gave no sign for 30 s" in json.loads(told["node-a"])["problems"]
    problems = json.loads(told["node-b"])["problems"]
    assert any("the node that all meet at, node-a:" in line for line in problems), problems


TOLD_WHEN_WAITING = """
import socket
from pathlib import Path
import importlib
module = importlib.import_module("planner.runtime.preflight.preflight")

awaited = module.await_findings

def await_findings(*args):
    Path(f"waits-{socket.gethostname()}").touch()
    return awaited(*args)

module.await_findings = await_findings
"""

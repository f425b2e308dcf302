"""Issue 19, 7: launchers meet, compare what they are, and each starts ranks of its own."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.language.templates import Transformer, build_transformer
from planner.runtime.preflight import facts
from planner.runtime.preflight.exchanges import Exchange
from planner.runtime.preflight.facts import facts_of_this_node
from planner.runtime.preflight.preflight import preflight
from planner.runtime.preflight.rank import Finding
from planner.units import GIB, MIB
from tests.spawn import PATIENCE_S, free_port

module = sys.modules[preflight.__module__]  # its package calls the function the same


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.setattr(module, "started", lambda environment: None)


@pytest.fixture
def run(tmp_path) -> tuple[Path, Path]:
    """A plan for two pipeline ranks of two replicas, and a script."""
    graph = build_transformer(
        Transformer(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, seq_len=8)
    )
    plan = default_plan(graph, dp=2, pp=2)
    cluster = plan.cluster.model_copy(update={"devices_per_node": 2})
    save_plan(plan.model_copy(update={"cluster": cluster}), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("x = 1\n")
    return tmp_path / "plan.json", tmp_path / "train.py"


class Nodes:
    """Launchers as threads of this process; ranks are findings at once.

    Thread t says it is node `names[t]`. `started` has the ranks, world size and request of each.
    """

    def __init__(self, monkeypatch, names, *, differ=lambda facts, name: facts):
        self.names, self.started = names, {}
        self._number = threading.local()

        def facts_here(**told):
            name = self.names[self._number.value]
            return differ(replace(facts_of_this_node(**told), node=name, name=name), name)

        @contextmanager
        def children(request, ranks, world_size, variables):
            self.started[self._number.value] = list(ranks), world_size, request
            yield []

        def await_findings(store, room, world_size, own, lost):
            pair = Exchange(axis="data", kind="all_reduce", ranks=(0, 1))
            found = {
                rank: Finding(
                    phase="done", clocks=[1.0], free_bytes=8 * GIB, shares_memory=True,
                    checks_s=0.25, timed=[(pair, MIB, 0.5)] if rank < 2 else [],
                )
                for rank in range(world_size)
            }  # fmt: skip
            return found, {}

        # A digest of all source, which someone may edit while this runs.
        monkeypatch.setattr(facts, "_own_version", lambda: "1.0")
        monkeypatch.setattr(module, "facts_of_this_node", facts_here)
        monkeypatch.setattr(module, "children", children)
        monkeypatch.setattr(module, "await_findings", await_findings)

    def reports(self, run, **options):
        """The report of each launcher."""
        count, rendezvous = len(self.names), f"127.0.0.1:{free_port()}"

        def launch(number: int):
            self._number.value = number
            return preflight(
                *run, "cpu", num_nodes=count, rendezvous=rendezvous, meet_s=PATIENCE_S, **options
            )

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(launch, range(count)))


def test_each_node_starts_the_ranks_that_it_has_in_the_run_and_tells_the_same(monkeypatch, run):
    """Ranks go to nodes in the order of their names, whoever came first."""
    nodes = Nodes(monkeypatch, ["b", "a"])
    first, second = nodes.reports(run)
    assert {nodes.names[at]: ranks for at, (ranks, _, _) in nodes.started.items()} == {
        "a": [0, 1], "b": [2, 3]
    }  # fmt: skip
    requests = [request for _, _, request in nodes.started.values()]
    assert requests[0] == requests[1]
    assert requests[0].nodes == ((0, 1), (2, 3))
    assert {size for _, size, _ in nodes.started.values()} == {4}
    assert first.nodes == ("a", "b")
    assert first.problems == ()
    assert sorted([first.is_first, second.is_first]) == [False, True]
    assert first.checks == second.checks
    (rate,) = first.rates
    assert (rate.nodes, rate.seconds, rate.planned_s) == (("a",), 0.5, None)
    # What ranks took to start is what is left of the whole.
    assert first.checks_s == 0.25
    assert first.to_dict().keys() == second.to_dict().keys()


def test_ranks_of_other_plans_can_not_meet_so_none_start(monkeypatch, run):
    def differ(facts, name):
        (what, digest), *others = facts.files
        return replace(facts, files=((what, digest if name == "a" else "22bb"), *others))

    nodes = Nodes(monkeypatch, ["a", "b"], differ=differ)
    first, second = nodes.reports(run)
    assert nodes.started == {}
    assert first.checks == second.checks
    (line,) = first.problems
    assert line.startswith(f"the plan {run[0]} is not the same on all nodes: ")
    assert line.endswith("22bb on b")


def test_a_script_that_differs_is_told_and_ranks_start_anyway(monkeypatch, run):
    def differ(facts, name):
        plan, (what, digest) = facts.files
        return replace(facts, files=(plan, (what, digest if name == "a" else "33cc")))

    nodes = Nodes(monkeypatch, ["a", "b"], differ=differ)
    first, _ = nodes.reports(run)
    assert len(nodes.started) == 2
    assert [line.split(" is not")[0] for line in first.problems] == [f"the script {run[1]}"]


def test_nodes_that_refuse_say_why_and_start_nothing(monkeypatch, run):
    nodes = Nodes(monkeypatch, ["a", "b"])
    plan_path, script = run
    script.unlink()
    for missing in ("train.py", "plan.json"):
        first, second = nodes.reports((plan_path, script))
        assert nodes.started == {}
        assert first.problems == second.problems
        told = [line for line in first.problems if "can't run the plan: " in line]
        assert [line[0] for line in told] == ["a", "b"]
        assert all(missing in line for line in told)
        plan_path.write_text("{")


def test_a_lone_node_that_can_not_run_the_plan_is_refused(monkeypatch, run):
    def never(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(module, "children", never)
    plan_path, script = run
    script.unlink()
    with pytest.raises(PlanError, match=r"no script .*train.py; give the Python file"):
        preflight(plan_path, script, "cpu")


def test_facts_come_back_from_the_store_as_they_were_told(run):
    facts = facts_of_this_node(
        plan=None, plan_path=run[0], script=run[1], device="cpu", ranks_here=2, refusal="why"
    )
    assert module._facts(json.dumps(asdict(facts))) == facts


def test_ranks_of_a_node_may_lie_apart():
    assert module._ranks_of_nodes(["b", "a", "b", "c"]) == ((0, 2), (1,), (3,))


def test_a_device_that_torch_has_not_is_refused(run):
    with pytest.raises(PlanError, match=r"device '\(' is unknown; use cpu"):
        preflight(*run, "(")

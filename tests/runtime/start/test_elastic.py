"""X15: a node is lost and comes back; the run goes on under another plan, and under its own again.

Four nodes of one rank on this machine, each with a launcher of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from planner.language.lowering.defaults import default_plan
from planner.language.plan import load_plan, save_plan
from tests.runtime.scenarios import capture
from tests.runtime.start.test_course import ROOT, TRAIN, curve, losses_alone
from tests.spawn import free_port, until

RUN = """
import sys
from pathlib import Path
from planner.language.plan import Plan
from planner.language.lowering.defaults import default_plan
from planner.runtime.start.course import Keeping
from planner.runtime.start.launch import launch
import torch
from tests.runtime.scenarios import capture

def replan(counts, limit):
    print("replan", list(counts), limit, file=sys.stderr, flush=True)
    graph = capture("gpt", torch.float64)
    return default_plan(graph, pp=2, num_microbatches=2, microbatch_size=4)

keeping = Keeping(
    folder=Path("run"), save_every=1, max_restarts=9, min_ranks=2, replan=replan
)
sys.exit(
    launch(
        "plan.json", "train.py", sys.argv[2:], "cpu",
        num_nodes=4, rendezvous="localhost:" + sys.argv[1], keeping=keeping,
    )
)
"""


class Node:
    """A launcher in a session of its own."""

    def __init__(self, folder: Path, name: str, port: int, steps: int) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(port), str(steps), "0.5", ""],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the launcher without a word; the kernel ends its ranks."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait_until(folder: Path, nodes: list[Node], ranks: int, lines: int) -> None:
    """Wait until so many further steps ran on so many ranks."""
    log = folder / "log-0"
    known = log.read_text().count(f" {ranks}]\n") if log.exists() else 0

    def told() -> str:
        return "".join(node.log.read_text() for node in nodes)

    def ran() -> bool:
        assert any(node.process.poll() is None for node in nodes), told()
        return log.exists() and log.read_text().count(f" {ranks}]\n") >= known + lines

    until(ran, told, each_s=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lost_node_and_its_return(tmp_path):
    """4 ranks, 2 after a node has gone (of three left, one is spare), 4 again when it is back: the
    curve is that of one process."""
    plan = default_plan(capture("gpt", torch.float64), dp=4, microbatch_size=1)
    assert plan.global_batch == 8
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    port, steps = free_port(), 60
    nodes = [Node(tmp_path, f"node-{n}", port, steps) for n in range(1)]
    try:
        time.sleep(3)  # the first one has the store of the rendezvous
        nodes += [Node(tmp_path, f"node-{n}", port, steps) for n in range(1, 4)]
        wait_until(tmp_path, nodes, ranks=4, lines=3)
        nodes[3].kill()
        wait_until(tmp_path, nodes[:3], ranks=2, lines=3)
        nodes[3] = Node(tmp_path, "node-3", port, steps)
        wait_until(tmp_path, nodes, ranks=4, lines=3)
        codes = [node.process.wait(timeout=300) for node in nodes]
    finally:
        told = "\n".join(node.log.read_text() for node in nodes)
        for node in nodes:
            node.kill()
    assert codes == [0, 0, 0, 0], told
    assert "replan [2, 3] None" in told
    (made,) = (tmp_path / "run").glob("plan-3-ranks-of-*.json")
    assert load_plan(made).world_size == 2
    rows = curve(tmp_path)
    sizes = [int(size) for _, _, size in rows]
    changes = [b for a, b in zip([0, *sizes], sizes, strict=False) if a != b]
    assert changes == [4, 2, 4]
    losses = [loss for loss, *_ in rows]
    torch.testing.assert_close(losses, losses_alone(plan, steps), rtol=1e-9, atol=0)

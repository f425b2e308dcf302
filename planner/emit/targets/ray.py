"""Ray: a driver that takes whole nodes and starts torchrun on each.

Source: Ray 2's documentation of placement groups (STRICT_SPREAD: a bundle a node), of tasks'
options (num_cpus, num_gpus, max_retries, scheduling_strategy), of custom resources (a node has
those that its `ray start --resources` names) and of ray.util.get_node_ip_address.
"""

from __future__ import annotations

import json
import shlex

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, headline, runs_by_apply, torchrun_script
from planner.emit.view import PlanView

DRIVER_FILE = "ray_driver.py"


def _write(view: PlanView) -> Emitted:
    nodes = "\n".join(
        f"    *[{(run.group, run.ranks if view.device == 'cuda' else 0)}] * {run.nodes},"
        for run in view.node_runs
    )
    text = "\n".join(headline(view, "A Ray driver")) + _DRIVER.format(
        nodes=nodes, script=view.launch.path(TORCHRUN_FILE)
    )
    driver = shlex.quote(view.launch.path(DRIVER_FILE))
    notes = [f"submit from here: ray job submit --working-dir . -- python {driver}"]
    if named := view.node_runs[0].group:
        notes.append(
            "start Ray on each node with a resource that is called like its group, for example: "
            f"ray start --resources='{json.dumps({named: 1})}'"
        )
    return Emitted(
        files={DRIVER_FILE: text, TORCHRUN_FILE: torchrun_script(view)}, notes=tuple(notes)
    )


_DRIVER = '''
"""Run with the arguments of the training script, where Ray's nodes find {script}."""

import os
import socket
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# The group of devices that each node is of, and its GPUs, in the order of ranks.
NODES = [
{nodes}
]


def address():
    """Where node 0 is, and a port that is free there."""
    with socket.socket() as free:
        free.bind(("", 0))
        return get_node_ip_address(), free.getsockname()[1]


def run(node, master, arguments):
    """All ranks of a node; a failure is Ray's to tell."""
    environment = os.environ | {{
        "NODE_RANK": str(node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }}
    subprocess.run(["bash", {script!r}, *arguments], env=environment, check=True)


def main():
    ray.init(address=os.environ.get("RAY_ADDRESS"))
    # A bundle for each node, all of them or none: the ranks of a part would wait.
    wanted = [{{"CPU": 1.0, "GPU": float(gpus), kind: 1.0}} for kind, gpus in NODES]
    bundles = [{{k: n for k, n in each.items() if k and n}} for each in wanted]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(function, node, *, gpus):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        # A task that is tried again alone would wait for the others: the run is tried again whole.
        options = {{"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}}
        return ray.remote(function).options(scheduling_strategy=strategy, **options)

    try:
        master = ray.get(on(address, 0, gpus=0).remote())
        nodes = [on(run, node, gpus=gpus) for node, (_, gpus) in enumerate(NODES)]
        ray.get([each.remote(node, master, sys.argv[1:]) for node, each in enumerate(nodes)])
    finally:
        remove_placement_group(group)


if __name__ == "__main__":
    main()
'''

RAY = register_emitter(
    Emitter(
        name="ray",
        summary="a driver that takes whole nodes, and what it starts on each",
        expresses=runs_by_apply(),
        write=_write,
    )
)

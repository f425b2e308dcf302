"""Ray: a driver that takes whole nodes and starts torchrun on each.

Source: Ray 2's documentation of placement groups (STRICT_SPREAD: a bundle a node), of tasks'
options (num_cpus, num_gpus, max_retries, scheduling_strategy) and of ray.util.get_node_ip_address.
"""

from __future__ import annotations

import shlex

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, headline, runs_by_apply, torchrun_script
from planner.emit.view import PlanView

DRIVER_FILE = "ray_driver.py"


def _write(view: PlanView) -> Emitted:
    gpus = view.ranks_per_node if view.device == "cuda" else 0
    text = "\n".join(headline(view, "A Ray driver")) + _DRIVER.format(
        nodes=view.num_nodes, gpus=gpus, script=view.launch.path(TORCHRUN_FILE)
    )
    driver = shlex.quote(view.launch.path(DRIVER_FILE))
    return Emitted(
        files={DRIVER_FILE: text, TORCHRUN_FILE: torchrun_script(view)},
        notes=(f"submit from here: ray job submit --working-dir . -- python {driver}",),
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

NODES = {nodes}
GPUS = {gpus}


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
    bundle = {{"CPU": 1.0}} | ({{"GPU": float(GPUS)}} if GPUS else {{}})
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(function, node, *, gpus):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        # A task that is tried again alone would wait for the others: the run is tried again whole.
        options = {{"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}}
        return ray.remote(function).options(scheduling_strategy=strategy, **options)

    try:
        master = ray.get(on(address, 0, gpus=0).remote())
        nodes = [on(run, node, gpus=GPUS) for node in range(NODES)]
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

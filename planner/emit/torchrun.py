"""The part of scripts that starts processes on every node, by torchrun.

Ranks of a plan follow each other along its axes, the innermost first, so node n holds the ranks
from n * ranks_per_node on. A static rendezvous keeps that order: the dynamic one orders nodes by
their names.
"""

from __future__ import annotations

from planner.emit.view import PlanView

NODE_SETTINGS = (
    "# Node 0 is at MASTER_ADDR; every node runs this script with its own NODE_RANK.",
    ': "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}" "${NODE_RANK:=0}"',
)
"""Shell lines: where node 0 is, and the number of this node."""


def torchrun_lines(view: PlanView, *program: str, max_restarts: int = 0) -> list[str]:
    """Return the lines of a torchrun command for one node, a backslash behind each but the last.

    `program` are the words behind torchrun's own options. MASTER_ADDR, MASTER_PORT and NODE_RANK
    are variables of the script.
    """
    words = [
        f"exec torchrun --nnodes {view.num_nodes} --nproc-per-node {view.ranks_per_node}",
        '--node-rank "$NODE_RANK" --rdzv-backend static',
        '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
    ]
    if max_restarts:
        words.append(f"--max-restarts {max_restarts}")
    words += program
    lines = [words[0], *(f"    {word}" for word in words[1:])]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def headline(view: PlanView, what: str) -> list[str]:
    """Return the comment at the top of a file: what it is of, in a line or two."""
    plan = view.plan
    degrees = " ".join(
        f"{name}={size}" for name, size in (*plan.degrees.sizes.items(), ("pp", plan.pp))
    )
    return [
        f"# {what}, written by `planner emit` from {view.launch.plan_file}:",
        f"# {plan.world_size} ranks, {degrees} vpp={plan.vpp}, {plan.schedule}, "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size}, ZeRO {plan.zero_stage}.",
    ]

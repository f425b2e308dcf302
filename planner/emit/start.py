"""Parts that scripts share: processes of a node by torchrun, its settings, its health.

Ranks of a plan follow each other along its axes, the innermost first, so node n holds the ranks
that follow those of the nodes before it; nodes of several groups of devices may have different
numbers (`PlanView.node_runs`), which torchrun adds up. A static rendezvous keeps that order: the
dynamic one orders nodes by their names.
"""

from __future__ import annotations

import shlex

from planner.emit.emitter import Rule
from planner.emit.features import plan_features
from planner.emit.view import PlanView

NODE_SETTINGS = (
    "# Node 0 is at MASTER_ADDR; every node runs this script with its own NODE_RANK.",
    ': "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}" "${NODE_RANK:=0}"',
)
"""Shell lines: where node 0 is, and the number of this node."""

TORCHRUN_FILE = "torchrun.sh"
"""What scripts of clusters start on each node."""


def runs_by_apply() -> dict[str, str | Rule]:
    """Return what scripts that call `planner.apply` express: every feature."""
    return {feature.name: "planner.apply" for feature in plan_features()}


def torchrun_lines(view: PlanView, *program: str, restarts: bool = False) -> list[str]:
    """Return the lines of a torchrun command for one node, a backslash behind each but the last.

    `program` are the words behind torchrun's own options. MASTER_ADDR, MASTER_PORT and NODE_RANK
    are variables of the script, and MAX_RESTARTS with `restarts`.
    """
    words = [
        f"exec torchrun --nnodes {view.num_nodes} --nproc-per-node {_ranks_here(view)}",
        '--node-rank "$NODE_RANK" --rdzv-backend static',
        '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
    ]
    if restarts:
        words.append('--max_restarts "${MAX_RESTARTS:-0}"')
    words += program
    lines = [words[0], *(f"    {word}" for word in words[1:])]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _ranks_here(view: PlanView) -> str:
    """Return the ranks of a node, or the shell's variable of them where nodes differ."""
    runs = view.node_runs
    return str(runs[0].ranks) if len(runs) == 1 else '"$RANKS_HERE"'


def _node_sizes(view: PlanView) -> list[str]:
    """Shell lines that set RANKS_HERE where nodes have different numbers of ranks."""
    runs = view.node_runs
    if len(runs) == 1:
        return []
    lines, first = ["# Nodes differ in their ranks, and follow each other in this order."], 0
    for at, run in enumerate(runs):
        first += run.nodes
        last = at == len(runs) - 1
        test = "else" if last else f'{"elif" if at else "if"} [ "$NODE_RANK" -lt {first} ]; then'
        lines.append(f"{test} RANKS_HERE={run.ranks}  # of {run.group}")
    return [*lines, "fi"]


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


def torchrun_script(view: PlanView) -> str:
    """Return the script that checks a node and starts its ranks."""
    launch = view.launch
    lines = ["#!/usr/bin/env bash", *headline(view, "A node of a run"), "set -euo pipefail"]
    lines += [*NODE_SETTINGS, *_node_sizes(view), f"export PLANNER_DEVICE={view.device}"]
    if view.device == "cuda":
        lines += [
            "# NCCL says why it fails, and keeps its last collectives for a report of a hang.",
            'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"',
            'export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"',
            'export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"',
        ]
        if view.num_nodes > 1:
            lines.append(
                "# Where nodes have several networks, also set NCCL_SOCKET_IFNAME and NCCL_IB_HCA."
            )
    lines += _health_check(view)
    if view.num_nodes == 1:
        lines += [
            "# A rank that fails ends the run. MAX_RESTARTS starts all ranks again: they go on",
            "# from a checkpoint where the script loads it (engine.load), else they begin anew.",
        ]
    words = [shlex.quote(launch.script), *map(shlex.quote, launch.arguments), '"$@"']
    lines += torchrun_lines(view, " ".join(words), restarts=view.num_nodes == 1)
    return "\n".join(lines) + "\n"


def _health_check(view: PlanView) -> list[str]:
    """Shell lines that end the script where a node can't run its ranks, before any starts."""
    plan, script = shlex.quote(view.launch.plan_file), shlex.quote(view.launch.script)
    lines = [
        "# What a node lacks is told before any rank waits for it.",
        'unhealthy() { echo "node $NODE_RANK ($(hostname)): $1" >&2; exit 1; }',
        f"for file in {plan} {script}; do",
        '    [ -r "$file" ] || unhealthy "no file $file"',
        "done",
        'python -c "import planner" || unhealthy "planner is not installed"',
    ]
    if view.device == "cuda":
        count = _ranks_here(view).strip('"')
        lines += [
            "gpus=$(nvidia-smi --list-gpus | wc -l)",
            f'[ "$gpus" -ge {count} ] || unhealthy "$gpus of {count} GPUs answer"',
            "errors=$(nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total \\",
            "    --format=csv,noheader | grep -c '^[1-9]' || true)",
            '[ "$errors" -eq 0 ] || unhealthy "$errors GPUs have uncorrected memory errors"',
        ]
    return lines

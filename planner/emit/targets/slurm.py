"""Slurm: a batch script that starts torchrun once on each node.

Source: sbatch(1) and srun(1) of Slurm (SLURM_NODEID numbers the nodes of a step in the order of
their list; --requeue and --open-mode; --kill-on-bad-exit), and its guide to heterogeneous jobs
("hetjob" between components, SLURM_JOB_NODELIST_HET_GROUP_n; srun --het-group joins components in
one step, whose SLURM_PROCID counts the tasks of all, component by component).
"""

from __future__ import annotations

import re
import shlex

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, headline, runs_by_apply, torchrun_script
from planner.emit.view import PlanView
from planner.language.plan.node_runs import NodeRun

SBATCH_FILE = "slurm.sbatch"


def job_name(model: str) -> str:
    """Return the name of a model's job: a word that neither sbatch nor a file's name misreads."""
    return re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") or "run"


def _write(view: PlanView) -> Emitted:
    lines = ["#!/usr/bin/env bash", *headline(view, "A Slurm job")]
    lines += [f"#SBATCH --job-name={job_name(view.plan.model.name)}"]
    first_run, *others = view.node_runs
    lines += _component(view, first_run)
    lines += [
        "# A node that fails puts the job back into the queue; the script goes on from the",
        "# checkpoint that it loads (engine.load).",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
    ]
    # The script runs in the first component, so what is said of the job is said there.
    for run in others:
        lines += ["#SBATCH hetjob", *_component(view, run)]
    # Of a heterogeneous job only a step over all components numbers the tasks of all.
    first, number, components = "SLURM_JOB_NODELIST", "SLURM_NODEID", ""
    if others:
        first, number = "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_PROCID"
        components = f" --het-group=0-{len(others)}"
    lines += [
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        "# The first node of the list has node id 0, and so rank 0.",
        f'MASTER_ADDR=$(scontrol show hostnames "${first}" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        "# A task that fails ends the others: they would wait for it.",
        f"exec srun{components} --kill-on-bad-exit=1 bash -c \\",
        f"    'NODE_RANK=${number} exec bash \"$@\"' node \\",
        f'    {shlex.quote(view.launch.path(TORCHRUN_FILE))} "$@"',
    ]
    return Emitted(
        files={SBATCH_FILE: "\n".join(lines) + "\n", TORCHRUN_FILE: torchrun_script(view)},
        notes=(f"submit from here: sbatch {shlex.quote(view.launch.path(SBATCH_FILE))}",),
    )


def _component(view: PlanView, run: NodeRun) -> list[str]:
    """Return the lines that say which nodes a job, or a component of it, has."""
    lines = [
        *([f"# Nodes of {run.group}: say which by --partition or --constraint."] * bool(run.group)),
        f"#SBATCH --nodes={run.nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
    ]
    if view.device == "cuda":
        lines.append(f"#SBATCH --gpus-per-node={run.ranks}")
    return lines


SLURM = register_emitter(
    Emitter(
        name="slurm",
        summary="a batch script, and what it starts on each node",
        expresses=runs_by_apply(),
        write=_write,
    )
)

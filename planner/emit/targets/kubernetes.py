"""Kubernetes: an Indexed Job of a pod for each node, found by a headless service.

Source: the Kubernetes documentation of Jobs (batch/v1: completionMode Indexed gives each pod
JOB_COMPLETION_INDEX and the host name NAME-INDEX; backoffLimit, restartPolicy) and of headless
services. A Job needs no operator to be installed. Where groups of devices have nodes of different
sizes, each run of equal nodes is a Job, and the pods of all have one label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, headline, runs_by_apply, torchrun_script
from planner.emit.view import PlanView
from planner.language.plan.node_runs import NodeRun

PORT = 29500

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Where a pod reads its number."""


def job_name(model: str) -> str:
    """Return the name of a model's Job: one of DNS (small letters, digits and dashes), of at most
    63 letters together with a pod's number.
    """
    return re.sub(r"[^a-z0-9]+", "-", f"planner-{model}".lower())[:50].strip("-")


def _write(view: PlanView) -> Emitted:
    name = job_name(view.plan.model.name)
    lines = headline(view, "A Kubernetes Job")
    lines += _indented(
        0,
        "apiVersion: v1",
        "kind: ConfigMap",
        f"metadata: {{name: {name}}}",
        "data:",
        f"  {TORCHRUN_FILE}: |",
    )
    lines += _indented(4, *torchrun_script(view).splitlines())
    lines += _indented(
        0,
        "---",
        "# Without an address of its own: it gives each pod a name that the others find.",
        "apiVersion: v1",
        "kind: Service",
        f"metadata: {{name: {name}}}",
        "spec:",
        "  clusterIP: None",
        "  publishNotReadyAddresses: true",
        f"  selector: {{{_label(view)}: {name}}}",
    )
    first = 0
    for run in view.node_runs:
        lines += _job(view, name, run, first)
        first += run.nodes
    return Emitted(
        files={"kubernetes.yaml": "\n".join(lines) + "\n"},
        notes=("put your image in the place of IMAGE: it has planner, the plan and the script",),
    )


def _job(view: PlanView, name: str, run: NodeRun, first: int) -> list[str]:
    """Return the lines of the Job of some equal nodes, the first of which has this number."""
    own = f"{name}-{first}" if first else name
    is_part = len(view.node_runs) > 1
    start = f"/planner/{TORCHRUN_FILE}"
    # Its index counts the pods of this Job alone.
    command = f"[bash, {start}]"
    if first:
        command = f'[bash, -c, "((NODE_RANK += {first})); exec bash {start}"]'
    lines = list[str]()
    lines += _indented(
        0,
        "---",
        *([f"# Nodes of {run.group}: say which by a nodeSelector."] if run.group else []),
        "apiVersion: batch/v1",
        "kind: Job",
        f"metadata: {{name: {own}}}",
        "spec:",
        "  completionMode: Indexed  # a pod's index is the number of its node",
        f"  completions: {run.nodes}",
        f"  parallelism: {run.nodes}",
        "  # A pod that fails ends the run: the ranks of the others would wait for it. Apply the",
        "  # Job again, and the script goes on from the checkpoint that it loads (engine.load).",
        "  backoffLimit: 0",
        "  template:",
        *([f"    metadata: {{labels: {{{_label(view)}: {name}}}}}"] if is_part else []),
        "    spec:",
        f"      subdomain: {name}",
        "      restartPolicy: Never",
        "      containers:",
        "        - name: ranks",
        "          image: IMAGE  # with planner, the plan and the script in its working directory",
        f"          command: {command}",
        "          env:",
        "            - name: NODE_RANK",
        "              valueFrom:",
        "                fieldRef:",
        f"                  fieldPath: {INDEX}",
        f"            - {{name: MASTER_ADDR, value: {name}-0.{name}}}",
        f'            - {{name: MASTER_PORT, value: "{PORT}"}}',
    )
    if view.device == "cuda":
        lines += _indented(10, "resources:", f"  limits: {{nvidia.com/gpu: {run.ranks}}}")
    lines += _indented(
        10,
        "volumeMounts:",
        "  - {name: scripts, mountPath: /planner}",
        "  - {name: memory, mountPath: /dev/shm}",
    )
    lines += _indented(
        6,
        "volumes:",
        f"  - {{name: scripts, configMap: {{name: {name}}}}}",
        "  # NCCL and data loaders share memory between processes; a pod has 64 MiB otherwise.",
        "  - {name: memory, emptyDir: {medium: Memory}}",
    )
    return lines


def _label(view: PlanView) -> str:
    """Return the label that all pods of a run have: one Job gives its own, several share ours."""
    return "job-name" if len(view.node_runs) == 1 else "planner-run"


def _indented(spaces: int, *lines: str) -> Iterable[str]:
    return [" " * spaces + line for line in lines]


KUBERNETES = register_emitter(
    Emitter(
        name="kubernetes",
        summary="an Indexed Job of a pod for each node, its service and its script",
        expresses=runs_by_apply(),
        write=_write,
    )
)

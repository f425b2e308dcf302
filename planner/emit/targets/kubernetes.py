"""Kubernetes: an Indexed Job of a pod for each node, found by a headless service.

Source: the Kubernetes documentation of Jobs (batch/v1: completionMode Indexed gives each pod
JOB_COMPLETION_INDEX and the host name NAME-INDEX; backoffLimit, restartPolicy) and of headless
services. A Job needs no operator to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, headline, runs_by_apply, torchrun_script
from planner.emit.view import PlanView

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
    nodes = view.num_nodes
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
        f"  selector: {{job-name: {name}}}",
        "---",
        "apiVersion: batch/v1",
        "kind: Job",
        f"metadata: {{name: {name}}}",
        "spec:",
        "  completionMode: Indexed  # a pod's index is the number of its node",
        f"  completions: {nodes}",
        f"  parallelism: {nodes}",
        "  # A pod that fails ends the run: the ranks of the others would wait for it. Apply the",
        "  # Job again, and the script goes on from the checkpoint that it loads (engine.load).",
        "  backoffLimit: 0",
        "  template:",
        "    spec:",
        f"      subdomain: {name}",
        "      restartPolicy: Never",
        "      containers:",
        "        - name: ranks",
        "          image: IMAGE  # with planner, the plan and the script in its working directory",
        f"          command: [bash, /planner/{TORCHRUN_FILE}]",
        "          env:",
        "            - name: NODE_RANK",
        "              valueFrom:",
        "                fieldRef:",
        f"                  fieldPath: {INDEX}",
        f"            - {{name: MASTER_ADDR, value: {name}-0.{name}}}",
        f'            - {{name: MASTER_PORT, value: "{PORT}"}}',
    )
    if view.device == "cuda":
        gpus = view.ranks_per_node
        lines += _indented(10, "resources:", f"  limits: {{nvidia.com/gpu: {gpus}}}")
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
    return Emitted(
        files={"kubernetes.yaml": "\n".join(lines) + "\n"},
        notes=("put your image in the place of IMAGE: it has planner, the plan and the script",),
    )


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

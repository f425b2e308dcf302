"""torchrun: a script that checks a node and starts its ranks; run it on every node.

Source: the documentation of torch.distributed.run (--node-rank and --master-addr belong to the
static rendezvous, which numbers ranks by node), and of PyTorch's and NCCL's environment variables.
"""

from __future__ import annotations

import shlex

from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import TORCHRUN_FILE, runs_by_apply, torchrun_script
from planner.emit.view import PlanView


def _write(view: PlanView) -> Emitted:
    script = shlex.quote(view.launch.path(TORCHRUN_FILE))
    return Emitted(
        files={TORCHRUN_FILE: torchrun_script(view)},
        notes=(
            f"run from here: bash {script}"
            if view.num_nodes == 1
            else f"run from here on every node, each with its own NODE_RANK: bash {script}",
        ),
    )


TORCHRUN = register_emitter(
    Emitter(
        name="torchrun",
        summary="a script that checks a node and starts its ranks",
        expresses=runs_by_apply(),
        write=_write,
    )
)

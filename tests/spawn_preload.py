"""What test ranks need, imported once by the fork server that they come from."""

import contextlib
import gc
import importlib
import random

import torch

import planner.capture.module
import planner.runtime.state.optimizers.reach
from tests import captures, reaches

_NEEDED = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.export",
    "torch.utils.checkpoint",
    "planner.capture",
    "planner.runtime.step.engine",
    "planner.runtime.proofs.verify",
    "planner.runtime.preflight.rank",
    "planner.worker",
    "tests.runtime.scenarios",
)
_WHERE_INSTALLED = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("bert", "gpt2", "llama", "mixtral", "qwen3", "t5")
)

for _name in _NEEDED:
    importlib.import_module(_name)
for _name in _WHERE_INSTALLED:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

torch.set_num_threads(1)
random.seed(0)
torch.manual_seed(0)  # so that ranks draw the same in each session, and alike
planner.capture.capture_module = captures.capture_module  # as `planner.apply` finds it
planner.capture.module.capture_module = captures.capture_module  # as model files find it
reaches.measure_usual()
planner.runtime.state.optimizers.reach._reach = reaches.reach_of

# A collection in a rank goes through all objects that it has, and so copies each page of the
# server's: a quarter of a second of each rank. These stay, and need not be looked at.
gc.collect()
gc.freeze()

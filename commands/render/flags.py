"""Names of the Python interface as the command line spells them.

Rooms do not name flags. Their messages name a field or a function in backticks: `num_devices` 0 was
given. That reads well in Python, and the command line prints --gpus 0 was given.
"""

from __future__ import annotations

import re

SPELLINGS = {
    # Fields of a SearchRequest
    "num_devices": "--gpus",
    "global_batch": "--global-batch",
    "memory_limit_bytes": "--memory-limit",
    "memory_odds": "--memory-odds",
    "dp": "--dp",
    "tp": "--tp",
    "pp": "--pp",
    "vpp": "--vpp",
    "cp": "--cp",
    "hp": "--hp",
    "rp": "--rp",
    "ep": "--ep",
    "expert_imbalance": "--expert-imbalance",
    "microbatch_size": "--microbatch-size",
    "schedule": "--schedule",
    "zero": "--zero",
    "recompute": "--recompute",
    "max_gap": "--gap",
    "time_limit_s": "--time-limit",
    "solver": "--solver",
    "forbid": "--forbid",
    "allow": "--allow",
    "pins": "--pin",
    "precision": "--precision",
    "execution": "--execution",
    "receive_ahead": "--receive-ahead",
    "overlap": "--overlap",
    "logits": "--logits",
    "clip_gradients": "--clip-gradients",
    "balance": "--balance",
    "split_rank": "--split-rank",
    "offload": "--offload",
    "meshes": "--meshes",
    "num_best": "--measure",
    # Choices of a what-if
    "link_rate": "--link-rate",
    "deadline": "--deadline",
    "tokens": "--tokens",
    # Other arguments of functions that commands call
    "profile": "--profile",
    "measure": "--measure",
    "device": "--device",
    "kernels": "--kernels",
    "accept": "--accept",
    "devices": "--devices",
    "plugin": "planner --plugin",
    "timeline": "--timeline",
    "keep": "--keep",
    "save_every": "--save-every",
    "max_restarts": "--max-restarts",
    "elastic": "--elastic",
    "min_ranks": "--elastic",
    "preflight": "--preflight",
    "as_json": "--json",
    "num_nodes": "--num-nodes",
    "rendezvous": "--rendezvous",
    "on_oom": "--on-oom",
    "out": "--out",
    "by_block": "--by-block",
    "pareto": "--pareto",
    "budget_s": "--budget",
    "use_cache": "--no-cache",
    # Functions that are commands
    "measure_profile": "planner profile",
    "check_profile": "planner profile --check",
}
"""What the command line calls a field or a function."""

_NAME = re.compile(r"`(\w+)`")
_IN_GIB = re.compile(r"`memory_limit_bytes` ([\d.]+) GiB")  # --memory-limit counts GiB


def with_flags(message: str) -> str:
    """Return a message with names in backticks as flags and commands; others stay as they are."""
    message = _IN_GIB.sub(r"`memory_limit_bytes` \1", message)
    return _NAME.sub(lambda found: SPELLINGS.get(found[1], found[0]), message)

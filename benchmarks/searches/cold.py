"""What the whole `planner search` of a model costs without any cache, in imports of its library.

A command is run in a new process with an empty cache folder, in turns with a process that imports
torch and transformers' Llama alone. Both are told in seconds of CPU, exits counted, the least of
all turns; their ratio is what to read, since other work on a machine makes both larger. Models are
given by a Hugging Face config.json.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from benchmarks.harness import ROOT, Result, benchmark, note
from benchmarks.searches.cases import CASES, TINY, Case

GOALS = {"llama3-8b@8": 1.8, "llama3-405b@16384": 3.0, "1000-layer@512": 5.0}
"""In imports, by case."""

H100 = "h100-sxm5-80gb"
_IMPORTS = ("-c", "import torch; from transformers import LlamaConfig, LlamaForCausalLM")


@benchmark("cold", quick={"cases": (TINY,), "turns": 1})
def cold(
    *,
    cases: tuple[str, ...] = tuple(GOALS),
    turns: Annotated[int, "runs of each"] = 3,
    profile: str = H100,
) -> Result:
    rows = []
    for name in cases:
        imports, commands = [], []
        for _ in range(turns):
            imports.append(cpu_s(_IMPORTS))
            with tempfile.TemporaryDirectory() as folder:
                commands.append(cpu_s(_command(CASES[name], profile, Path(folder)), Path(folder)))
        row = {
            "case": name,
            "imports_s": round(min(imports), 2),
            "all_s": round(min(commands), 2),
            "in_imports": round(min(commands) / min(imports), 2),
            "goal": GOALS.get(name),
        }
        rows.append(row)
        note(row)
    return Result(rows)


def cpu_s(arguments: tuple[str, ...], folder: Path | None = None) -> float:
    """Return the seconds of CPU of a Python process, in a folder that is also its cache."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if folder is not None:
        variables["XDG_CACHE_HOME"] = str(folder / "cache")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder or ROOT,
        env=variables,
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _command(case: Case, profile: str, folder: Path) -> tuple[str, ...]:
    """Write a case's config.json, and return the search of it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": case.layers,
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "vocab_size": case.vocab,
        "max_position_embeddings": case.seq_len,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    asked = ("--gpus", str(case.gpus), "--global-batch", str(case.global_batch))
    length = ("--seq-length", str(case.seq_len))
    return ("-m", "cli", "search", "config.json", *asked, *length, "--profile", profile)

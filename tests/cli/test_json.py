"""`--json`: each command prints one document that parses, and docs/json.md lists its keys.

After a change of keys, write the page anew: WRITE_PAGES=1 pytest tests/cli/test_json.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import cli
from costmodel.estimate import cost_cache
from costmodel.lanes import timeline_with_lanes
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.nodes.check import judged
from planner.runtime.proofs.verify import Difference, VerifyReport
from planner.timeline import save_timeline
from profiles import load_profile
from tests.pages import check_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
H100 = ("--profile", "h100-sxm5-80gb")

OPAQUE = {"plan": "a plan file", "estimate": "of a plan file", "profile": "profile.json",
          "row": "a row of docs/estimate-rows.md"}  # fmt: skip
"""Objects whose keys are described elsewhere."""
FREE = {"changed", "pruned", "proved_by", "factors", "systems", "peak_flop_per_s", "mesh", "model",
        "kinds_s"}  # fmt: skip
"""Objects whose keys are names of things."""

INTRO = """# What `--json` prints

Every command but `ui`, a page, takes `--json`. It prints one JSON document on stdout; progress,
notes, warnings and lines such as `wrote plan.json` go to stderr. Errors stay one line on stderr,
with exit code 2. A number that is none (infinity) is `null`.

Names of keys have units: `_s` seconds, `_bytes` bytes, `_per_s` a second; `_fraction`, `share`,
`relative`, `gap` and `mfu` are parts of a whole; `num_...` counts. `[]` stands for each element of
a list, `*` for each name. Keys stay as they are within a version of planner; new ones may come.

This page is written by `WRITE_PAGES=1 pytest tests/cli/test_json.py` from what commands print.
"""


def keys_of(value: Any, path: str = "") -> dict[str, str]:
    """Return the kind of each value of a document by its path."""
    name = path.rpartition(".")[2]
    if isinstance(value, Mapping):
        if name in OPAQUE:
            return {path: f"object: {OPAQUE[name]}"}
        if name in FREE:
            return {f"{path}.*": kind_of(next(iter(value.values()), ""))} if value else {}
        found: dict[str, str] = {}
        for key, each in value.items():
            found |= keys_of(each, f"{path}.{key}" if path else key)
        return found
    if isinstance(value, list):
        found = {}
        for each in value:
            found |= {k: v for k, v in keys_of(each, f"{path}[]").items() if k not in found}
        return found or {f"{path}[]": "list"}
    return {path: kind_of(value)}


def kind_of(value: Any) -> str:
    """Return what a reader calls a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "list"


@pytest.fixture
def files(planner, write_model, monkeypatch) -> None:
    """A model, two plans, a recorded run, a state dict, a table of rows, in this folder."""
    path = write_model()
    graph = load_graph(path)
    plan = default_plan(graph, pp=2, microbatch_size=2, num_microbatches=2)
    save_plan(plan, "plan.json")
    save_plan(default_plan(graph, dp=2, microbatch_size=4), "other.json")
    lines = []
    for line in timeline_with_lanes(plan, cost_cache(graph, load_profile(H100[1]), 2)):
        spans = [
            replace(span, step=step, start_s=span.start_s + step, end_s=span.end_s + step)
            for step in range(6)
            for span in line.spans
        ]
        lines.append(replace(line, spans=tuple(spans)))
    save_timeline(lines, "run")
    Path("rows.csv").write_text(
        "stack,gpu,gpus,model,tp,pp,dp,micro_batch,global_batch,seq_len\n"
        "megatron-core,H100,8,llama-3-8b,8,1,1,1,8,4096\n"
    )
    Path("flags.txt").write_text(
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16"
    )
    Path("train.log").write_text("elapsed time per iteration (ms): 12000.0 |\n" * 9)
    Path("train.py").write_text("print('a rank')\n")


CALLS: dict[str, tuple[tuple[object, ...], ...]] = {
    "profile": (("show", H100[1]), ("--check", "folder"), ("--device", "cpu", "--out", "folder")),
    "search": (("model.py", "--gpus", 2, *H100, "--pareto-gpus", "1", "--out", "found.json"),
               ("model.py", "--gpus", 2, *H100, "--memory-limit", 2)),
    "show": (("plan.json",), ("found.json",)),
    "launch": (("plan.json", "train.py"),),
    "why": (("model.py", "--gpus", 2, *H100, "--pp", 2),),
    "what-if": (("plan.json", "model.py", "--gpus", "4"),),
    "diff": (("plan.json", "other.json", "model.py"),),
    "estimate": (("plan.json", "model.py", *H100),
                 ("plan.json", "model.py", *H100, "--node-mtbf", 100, "--checkpoint-seconds", 10,
                  "--restart-seconds", 60),
                 ("--batch", "rows.csv", "--out", "priced.csv")),
    "simulate": (("plan.json", "model.py", *H100),),
    "timeline": (("run", "--trace", "trace.json"),),
    "compare": (("plan.json", "model.py", "run", *H100, "--calibrate"),),
    "calibrate": (("train.log,flags.txt", "--gpus", 8, "--gpu", "H100", "--out", "learned"),),
    "verify": (("plan.json", "model.py"), ("plan.json", "model.py", "--by-block")),
    "dryrun": (("plan.json", "model.py"),),
    "check": (("flags.txt", "--gpus", 8),),
    "doctor": ((),),
    "emit": (("plan.json", "--to", "torchrun"), ("--to", "list")),
    "convert": (("weights.pt", "weights.safetensors"),),
}  # fmt: skip
"""How each command is called, by its name."""


@pytest.fixture
def fast(monkeypatch) -> None:
    """Parts that take seconds of real ranks answer at once."""
    found = Difference(relative=1e-12, rounding=1e-12, name="layers.0.weight", step=1)
    report = VerifyReport(num_ranks=2, tolerance=1e-8, parameter=found, losses=(1.0,), notes=())
    monkeypatch.setattr("planner.runtime.proofs.verify.verify", lambda *args, **more: report)
    monkeypatch.setattr("planner.doctor.diagnose", lambda progress: [judged("memory", "enough")])
    monkeypatch.setattr(
        "profiles.measure_profile", lambda folder, **more: load_profile("h100-sxm5-80gb")
    )

    def start(*args: Any, **more: Any) -> int:
        os.write(1, b"a rank prints\n")  # as a process of its own does
        return 0

    monkeypatch.setattr("planner.runtime.start.launch.launch", start)


def test_every_command_prints_one_document_and_its_keys_are_listed(planner, files, fast):
    import torch

    torch.save({"layers.0.weight": torch.zeros(2)}, "weights.pt")
    assert planner("search", "model.py", "--gpus", 2, *H100, "--out", "found.json").code == 0
    sections, refused = [], {("search", 1): 2, ("profile", 1): 1}
    for name, calls in CALLS.items():
        keys: dict[str, str] = {}
        for number, words in enumerate(calls):
            # (What follows the script of `launch` is the script's.)
            given = ("--json", *words) if name == "launch" else (*words, "--json")
            done = planner(name, *given)
            expected = refused.get((name, number), 0)
            assert done.code == expected, f"{name} {words}: {done.stderr}\n{done.stdout[-500:]}"
            document = json.loads(done.stdout)  # nothing else is there
            assert isinstance(document, dict), name
            for key, kind in keys_of(document).items():
                if keys.get(key) in (None, "null", "list"):
                    keys[key] = kind
        lines = [f"| `{key}` | {kind} |" for key, kind in sorted(keys.items())]
        sections.append("\n".join([f"## {name}", "", "| key | value |", "|---|---|", *lines]))
    check_page(PAGE, INTRO + "\n" + "\n\n".join(sections) + "\n")


def test_all_commands_have_the_option():
    commands = typer.main.get_command(cli.app).commands
    del commands["ui"]  # a page: it answers a browser until it is interrupted
    assert set(commands) == set(CALLS)
    for name, command in commands.items():
        (option,) = [each for each in command.params if "--json" in each.opts]
        assert option.help.startswith("Print one JSON document"), name


def test_units_stand_in_names():
    """What counts seconds or bytes says so: names without a unit are numbers of no unit."""
    numbers = {
        line.split("`")[1].rpartition(".")[2].removesuffix("[]")
        for line in PAGE.read_text().splitlines()
        if line.endswith("| number |")
    }
    known = {
        "*", "bottleneck_pp_rank", "checkpoint_interval_steps", "considered", "cost_per_step",
        "error_after", "error_before", "evaluated", "exit_code", "first_block", "first_rank",
        "gap", "last_block", "last_rank", "losses", "mfu", "microbatch", "microbatch_size",
        "placements_gap", "pp_rank", "rank", "relative", "rounding", "share", "stage", "step",
        "steps", "times_rounding", "tolerance", "unexplored", "zero_stage",
        "dp", "tp", "cp", "pp", "vpp",
    }  # fmt: skip
    """Counts, numbers of things, parts of a whole, relative errors."""
    units = ("_s", "_bytes", "_fraction", "_per_s", "_per_device")
    unnamed = {n for n in numbers if not n.startswith("num_") and not n.endswith(units)} - known
    assert not unnamed

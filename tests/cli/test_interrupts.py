"""Ctrl-C in the middle of a write leaves the old file or the new one, and nothing beside it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from planner import files
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan

ROOT = Path(__file__).resolve().parents[2]
H100 = ("--profile", "h100-sxm5-80gb")
FLAGS = "stack,gpu,gpus,model,tp,pp,dp,micro_batch,global_batch,seq_len\n"
ROW = "megatron-core,H100,8,llama-3-8b,8,1,1,1,8,4096\n"


@pytest.fixture
def given(planner, write_model) -> None:
    """A model, a plan, a table, weights, and old files where commands write."""
    save_plan(default_plan(load_graph(write_model()), dp=2, microbatch_size=4), "plan.json")
    save_plan(default_plan(load_graph(Path("model.py"))), "other.json")
    Path("rows.csv").write_text(FLAGS + ROW)
    torch.save({"layers.0.weight": torch.zeros(2)}, "weights.pt")


WRITES = {
    "search": (("model.py", "--gpus", 2, *H100, "--out", "made", "--no-cache"), "made"),
    "search-pareto": (("model.py", "--gpus", 2, *H100, "--out", "p", "--pareto", "made",
                       "--no-cache"), "made"),
    "estimate": (("--batch", "rows.csv", "--out", "made", "--json"), "made"),
    "simulate": (("plan.json", "model.py", *H100, "--trace", "made"), "made"),
    "diff": (("plan.json", "other.json", "--patch", "made"), "made"),
    "emit": (("plan.json", "--to", "torchrun", "--out", "."), "torchrun.sh"),
    "show": (("plan.json", "model.py", *H100, "--html", "made"), "made"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_an_interrupted_write_leaves_the_old_file(planner, given, tmp_path, monkeypatch, name):
    words, target = WRITES[name]
    (tmp_path / target).write_text("old")
    before = set(os.listdir(tmp_path)) | {"cache", "p"}
    replace = os.replace
    reached = []

    def interrupted(source, destination):
        if Path(destination).name == target:
            reached.append(Path(source).read_bytes())
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(files.os, "replace", interrupted)
    done = planner(name.split("-")[0], *words)
    assert done.code == 130, done.stderr
    assert reached, "nothing was written in one piece"
    assert (tmp_path / target).read_text() == "old"
    assert set(os.listdir(tmp_path)) <= before
    assert done.stdout == "" or "wrote " + target not in done.stdout


@pytest.mark.parametrize("target", ["made.safetensors", "made.pt"])
def test_an_interrupted_conversion_leaves_nothing(planner, given, tmp_path, monkeypatch, target):
    """The tensors' file is half written when the interrupt comes."""
    before = set(os.listdir(tmp_path)) | {"cache"}

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    done = planner("convert", "weights.pt", target)
    assert done.code == 130, done.stderr
    assert set(os.listdir(tmp_path)) <= before


def test_an_interrupted_measurement_keeps_the_profile(tmp_path, monkeypatch):
    from profiles import load_profile
    from profiles.catalog import save_profile

    save_profile(load_profile("h100-sxm5-80gb"), tmp_path / "mine")
    old = (tmp_path / "mine" / "profile.json").read_text()

    def interrupted(source, destination):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_profile(load_profile("a100-sxm4-80gb"), tmp_path / "mine")
    assert (tmp_path / "mine" / "profile.json").read_text() == old
    assert os.listdir(tmp_path / "mine") == ["profile.json"]


OWN_FOLDERS = {
    "planner/files.py": "the function itself",
    "planner/doctor/pair.py": "the output of a child, in a scratch folder",
    "planner/runtime/process/ended.py": "a rank's own note, in a scratch folder",
    "planner/runtime/process/recorder.py": "spans are added while a run goes on",
    "planner/runtime/proofs/trials.py": "requests to ranks, in a scratch folder",
    "planner/runtime/proofs/verify.py": "requests to ranks, in a scratch folder",
    "planner/runtime/checkpoint/convert.py": "in a scratch folder",
    "planner/runtime/checkpoint/folder.py": "a checkpoint's folder is renamed when it is whole",
    "planner/runtime/checkpoint/storage.py": "a checkpoint's folder is renamed when it is whole",
    "planner/runtime/preflight/children.py": "requests to ranks, in a scratch folder",
    "planner/runtime/process/failures.py": "a file of its own in a scratch folder",
    "commands/render/error_report.py": "a new file of its own name",
}
"""Files that write without `planner.files`, and why they may."""


def test_all_files_are_written_by_one_function():
    """Else a new writer would leave half a file behind an interrupt."""
    found = set()
    for room in ("planner", "profiles", "costmodel", "search", "commands"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if any(map(_writes, ast.walk(ast.parse(path.read_text())))):
                found.add(str(path.relative_to(ROOT)))
    through = {
        "planner/timeline/spans.py", "costmodel/table/rows/row_files.py",
        "planner/runtime/checkpoint/weight_files/safetensors_files.py",
    }  # fmt: skip
    """Open the scratch file of `replacing`."""
    for name in through:
        assert "replacing(" in (ROOT / name).read_text()
    assert found - through <= set(OWN_FOLDERS)


def _writes(node: ast.AST) -> bool:
    """Whether a node opens a file to write to, by its name or its mode."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("write_text", "write_bytes"):
        return True
    modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return name == "open" and any(isinstance(m, str) and m[:1] in ("w", "x") for m in modes)

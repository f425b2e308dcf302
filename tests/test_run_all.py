"""B15: `benchmarks.gpu.run_all` on a CPU: parts, what a cut leaves, the report; what is packed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import pack, run_all
from benchmarks.gpu.cases import expect
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.parts.ranks import cases
from benchmarks.gpu.report import differences, mfu, write_report
from benchmarks.gpu.results import WHOLE, Result, append, read
from planner.language.schedule.registry import SCHEDULES

TRAINING = (
    *("planner.runtime.apply", "planner.runtime.step.engine", "planner.worker"),
    *("planner.capture", "planner.language.lowering.defaults"),
    *("profiles", "profiles.measure.measure", "profiles.measure.worker", "profiles.lookup.fit"),
    *("costmodel", "costmodel.estimate", "costmodel.memory.exact.plan_memory"),
    *("benchmarks.gpu.run_all", "benchmarks.gpu.measure", "benchmarks.gpu.cases"),
    *(f"benchmarks.gpu.parts.{part.name}" for part in PARTS),
    *("benchmarks.gpu.parts.rank", "scipy.optimize"),
)


# ------------------------------------------------------------------------------ results


def test_what_was_appended_comes_back_but_for_half_a_line(tmp_path):
    first = Result(part="a", check="b", status="pass", measured={"step_s": 1.0}, note="n")
    append(tmp_path, first)
    append(tmp_path, Result(part="a", check=WHOLE, status="done"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "a", "che')
    assert read(tmp_path) == [first, Result(part="a", check=WHOLE, status="done")]


def test_a_cut_part_keeps_its_place_and_goes_on(tmp_path, monkeypatch):
    """A part without time is cut; the same command runs it again, and then not any more."""
    monkeypatch.setattr(run_all, "GRACE_S", 0.0)
    part = Part(name="machine", share=1.0, tiny_share=0.2, says="")
    monkeypatch.setattr(run_all, "PARTS", (part,))
    command = ["--device", "cpu", "--out", str(tmp_path), "--budget", "180"]
    assert run_all.main(command) == 0
    assert [(r.check, r.status) for r in read(tmp_path)] == [(WHOLE, "cut")]
    part = Part(name="machine", share=1.0, tiny_share=120.0, says="")
    monkeypatch.setattr(run_all, "PARTS", (part,))
    assert run_all.main(command) == 0
    told = [(r.check, r.status) for r in read(tmp_path)]
    assert told == [(WHOLE, "cut"), ("device", "pass"), (WHOLE, "done")]
    assert run_all.main(command) == 0
    assert len(read(tmp_path)) == 3
    about = read(tmp_path)[1].about
    assert about["device"] == "cpu"
    assert set(about) == {"device", "driver", "torch", "date", "command"}


# ------------------------------------------------------------------------------- report


def test_the_report_has_what_is_a_tenth_off_and_where_to_look(tmp_path):
    near = {"step_s": 1.05, "tensor_bytes": 100.0}
    append(
        tmp_path,
        Result(
            part="steps",
            check="llama 1B",
            status="pass",
            measured={"step_s": 1.0, "tensor_bytes": 80.0},
            predicted={**near, "flop": 4e14},
            about={"device": "NVIDIA H100 80GB HBM3"},
        ),
    )
    plain = {"step_s": 2.0}
    append(tmp_path, Result(part="plain", check="llama 1B", status="pass", measured=plain))
    append(tmp_path, Result(part="ranks", check="zb_v on 2", status="fail", note="rank 1: gone"))
    (found,) = differences(read(tmp_path))
    assert (found["what"], found["ratio"]) == ("tensor_bytes", 1.25)
    shares = mfu(read(tmp_path), "cuda")["llama 1B"]
    assert shares["steps"] == pytest.approx(4e14 / 989.4e12)
    assert shares["plain"] == shares["steps"] / 2
    text = write_report(tmp_path, device="cuda")
    assert "FAIL ranks: zb_v on 2: rank 1: gone" in text
    assert "steps: llama 1B: tensor_bytes 80, predicted 100 (x 1.25) -> costmodel/memory" in text
    assert "MFU llama 1B: steps 40.4%, plain 20.2%" in text
    assert len(text.splitlines()) < 60
    assert json.loads((tmp_path / "report.json").read_text())["differing"] == [found]


# -------------------------------------------------------------------------------- parts


def test_ranks_train_every_schedule_and_kind_of_mesh():
    found = cases(tiny=False)
    assert len({case["name"] for case in found}) == len(found)
    assert {case["choices"]["schedule"] for case in found if "schedule" in case["choices"]} == set(
        SCHEDULES
    )
    assert {case["choices"].get("zero_stage") for case in found} >= {1, 2, 3}
    assert {2, 4, 8} == {case["ranks"] for case in found}
    assert any("by_stage" in case["choices"] for case in found)
    assert any("cp" in case["choices"] for case in found)


@pytest.mark.slow
def test_everything_runs_on_a_cpu(tmp_path):
    """At tiny sizes, with plans and predictions of before; nothing fails, all leave a result."""
    expect(tmp_path / "expected", tiny=True)
    # A busy machine may take several times as long as it should.
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--device", "cpu", "--budget", "900"]
    command += ["--out", str(tmp_path), "--expected", str(tmp_path / "expected")]
    done = subprocess.run(command, capture_output=True, text=True)
    results = read(tmp_path)
    assert [r for r in results if r.status in ("fail", "cut")] == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert {r.part for r in results if r.check == WHOLE and r.status == "done"} == {
        part.name for part in PARTS
    }
    checks = {(r.part, r.check): r for r in results}
    assert checks["steps", "tiny"].measured["step_s"] > 0
    assert checks["repriced", "tiny"].predicted["step_s"] > 0
    assert checks["ranks", "zb_v on 2"].measured["param_gap"] < 1e-9
    assert checks["host", "buffers"].status == "pass"
    assert checks["graphs", "stage"].measured["replay_s"] > 0
    assert checks["plain", "tiny"].measured["step_s"] > 0
    assert checks["profile", "machine"].measured["context_bytes"] > 0


# --------------------------------------------------------------------------------- pack


def _in_child(script: str) -> str:
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_training_profiling_and_pricing_load_no_solver():
    """Where OR-tools can't be imported everything that is packed can, and it is only so much."""
    script = f"""
import importlib, sys
from importlib import metadata
sys.modules["ortools"] = None
for name in {TRAINING!r}:
    importlib.import_module(name)
of = metadata.packages_distributions()
print(*{{name for top in {{m.split(".")[0] for m in sys.modules}} for name in of.get(top, ())}})
"""
    loaded = {name.replace("_", "-").lower() for name in _in_child(script).split()}
    with_torch = {"torch", "sympy", "mpmath", "typing-extensions", "setuptools", "networkx"}
    with_torch |= {"jinja2", "markupsafe", "filelock", "fsspec", "triton"}
    with_needed = {"pydantic-core", "annotated-types", "typing-inspection", "pygments"}
    with_needed |= {"markdown-it-py", "mdurl"}
    # Optional, where they are installed; "ortools" is the empty name that the script put there.
    optional = {"tqdm", "dill", "nvidia-ml-py", "numexpr", "ortools"}
    assert loaded - with_torch - with_needed - optional - {"planner"} == set(pack.NEEDED)


def test_what_is_packed_has_the_projects_own_bounds():
    text = (pack.ROOT / "pyproject.toml").read_text()
    found = pack.requirements((*pack.NEEDED, *pack.BESIDE))
    assert [pack._name(requirement) for requirement in found] == [*pack.NEEDED, *pack.BESIDE]
    assert all(f'"{requirement}"' in text for requirement in found)


def test_a_packed_tree_runs_by_itself(tmp_path):
    """Without the project's own folder, and it says which version it is."""
    pack.copy_tree(tmp_path)
    script = """
import benchmarks.gpu.run_all, planner, costmodel.estimate, tests.runtime.scenarios
from importlib import metadata
print(planner.__file__, benchmarks.gpu.run_all.__file__, metadata.version("planner"))
"""
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert found.returncode == 0, found.stderr
    *files, version = found.stdout.split()
    assert all(Path(file).is_relative_to(tmp_path) for file in files)
    assert version == "0.1.0"

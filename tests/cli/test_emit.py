"""`planner emit`: files written, features refused a line each, notes beside them."""

import json
import stat

from planner.emit import EMITTERS
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.plugins import PLUGIN_FILES
from tests.emit.views import view_of


def emit_plan(planner, tmp_path, *arguments, **cells):
    save_plan(view_of(**cells).plan, tmp_path / "plan.json")
    return planner("emit", "plan.json", *arguments)


def test_files_are_written_and_can_be_run(planner, tmp_path):
    done = emit_plan(planner, tmp_path, "--to", "slurm", "--out", "job", "--script", "my.py")
    assert done.code == 0, done.stderr
    assert done.stdout == "wrote job/slurm.sbatch\nwrote job/torchrun.sh\n"
    assert "submit from here: sbatch job/slurm.sbatch\n" in done.stderr
    assert "job/torchrun.sh" in (tmp_path / "job" / "slurm.sbatch").read_text()
    assert (tmp_path / "job" / "slurm.sbatch").stat().st_mode & stat.S_IXUSR
    assert "my.py" in (tmp_path / "job" / "torchrun.sh").read_text()


def test_every_refused_feature_is_a_line(planner, tmp_path):
    done = emit_plan(planner, tmp_path, "--to", "deepspeed")
    assert (done.code, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        f" deepspeed can't express {name}" for name in ("pp", "vpp", "cuts", "schedule", "layouts")
    ]
    assert "; --accept layouts has AutoTP's own placements instead" in lines[-1]
    assert not list(tmp_path.glob("*deepspeed*"))


def test_a_model_is_read_where_it_is_needed(planner, tmp_path, write_model):
    from planner.capture.source.capture_cache import load_graph

    graph = load_graph(write_model())
    save_plan(default_plan(graph, dp=2, zero_stage=2), tmp_path / "plan.json")
    alone = planner("emit", "plan.json", "--to", "deepspeed")
    assert "the dtype of the model must be read from the model; give its file" in alone.complaint
    both = planner("emit", "plan.json", "model.py", "--to", "deepspeed")
    assert both.code == 0, both.stderr
    assert json.loads((tmp_path / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 2


PLUGIN = """
from planner.emit import Emitted, Emitter, register_emitter

register_emitter(
    Emitter(
        name="plugged",
        summary="a line",
        expresses={"pp": "the number", "cuts": "-", "microbatches": "-", "precision": "-"}
        | dict.fromkeys(("dp", "tp", "vpp", "schedule", "zero", "layouts"), "-"),
        write=lambda view: Emitted(files={"plugged.txt": f"{view.plan.pp}"}),
    )
)
"""


def test_a_plugin_adds_a_system(planner, tmp_path, monkeypatch):
    monkeypatch.setenv(PLUGIN_FILES, "")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    save_plan(view_of().plan, tmp_path / "plan.json")
    try:
        done = planner("--plugin", "plugin.py", "emit", "plan.json", "--to", "plugged")
        assert done.stdout == "wrote plugged.txt\n", done.stderr
        assert (tmp_path / "plugged.txt").read_text() == "4"
    finally:
        EMITTERS.pop("plugged", None)


def test_targets_are_listed_and_suggested(planner, tmp_path):
    listed = planner("emit", "plan.json")
    assert listed.code == 0
    assert "torchtitan-toml  sections of" in listed.stdout
    wrong = emit_plan(planner, tmp_path, "--to", "torchtian")
    assert "did you mean 'torchtitan'?" in wrong.complaint


def test_bad_input_is_a_line(planner, tmp_path):
    assert (
        "`device`" not in emit_plan(planner, tmp_path, "--to", "ray", "--device", "tpu").complaint
    )
    accepted = planner("emit", "plan.json", "--to", "torchrun", "--accept", "pp")
    assert "--accept pp was given" in accepted.complaint
    assert "no plan file" in planner("emit", "none.json", "--to", "ray").complaint
    replaced = planner("emit", "torchrun.sh", "--to", "torchrun")
    assert replaced.code == 2

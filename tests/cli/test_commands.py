"""Commands as functions: what each makes of its options before and behind what it calls."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from commands.check import check
from commands.common import replan as replan_module
from commands.common.replan import replanner
from commands.convert import convert
from commands.emit import emit
from planner.errors import LayoutError, PlanError, PlannerError
from planner.language.plan import load_plan, save_plan
from tests.emit.views import view_of

# ---- check


def test_broken_rules_end_a_check_before_a_price(capsys):
    assert check("--num-layers 31 --hidden-size 64 --micro-batch-size 1 "
                 "--pipeline-model-parallel-size 2", gpus=2) == 2  # fmt: skip
    assert "31 layers" in capsys.readouterr().err


# ---- replan


@pytest.fixture
def plan(tmp_path):
    """A plan of Llama 3 8B whose model file is there."""
    (tmp_path / "model.py").write_text("")
    view = view_of()
    model = view.plan.model.model_copy(update={"file": str(tmp_path / "model.py")})
    return view.plan.model_copy(update={"model": model})


@pytest.fixture
def searched(monkeypatch):
    """What searches were asked, and a step of 100 / devices seconds for each but 6."""
    asked = []

    def find(graph, profile, request):
        asked.append(request)
        if request.num_devices == 6:
            raise LayoutError("6 does not divide")
        if request.num_devices < 4:
            return SimpleNamespace(plan=None, reasons=("too little memory",))
        found = SimpleNamespace(estimate={"step_s": 100 / request.num_devices})
        return SimpleNamespace(plan=found, reasons=())

    monkeypatch.setattr("search.find_plan_once", find)
    monkeypatch.setattr(replan_module, "graph_of_plan", lambda plan, model: "graph")
    return asked


def test_the_fastest_plan_of_what_is_left_is_taken(plan, searched):
    found = replanner(plan, "h100-sxm5-80gb")([8, 6, 4], 10**10)
    assert found.estimate == {"step_s": 100 / 8}
    assert [request.num_devices for request in searched] == [8, 6, 4]
    # The run goes on: its samples a step and its numbers' precision are those of the plan.
    assert {request.global_batch for request in searched} == {plan.global_batch}
    assert {request.precision for request in searched} == {plan.precision}
    assert {request.memory_limit_bytes for request in searched} == {10**10}


def test_no_plan_for_what_is_left_names_every_reason(plan, searched):
    with pytest.raises(PlanError, match="global batch of 64 on what is left") as told:
        replanner(plan, "h100-sxm5-80gb")([6, 2], None)
    assert "(6 ranks: 6 does not divide; 2 ranks: too little memory)" in str(told.value)


def test_what_a_later_search_needs_is_missed_before_the_run(plan, searched):
    gone = plan.model_copy(update={"model": plan.model.model_copy(update={"file": "gone.py"})})
    with pytest.raises(PlanError, match=r"the plan is for gone\.py, which is not here"):
        replanner(gone, None)
    with pytest.raises(PlanError, match="'abacus', which can't be read"):
        replanner(plan, "abacus")


# ---- convert


@pytest.fixture
def converted(monkeypatch):
    """What was converted, and how."""
    given = {}

    def convert_files(source, target, **options):
        given.update(options, source=source, target=target)
        return SimpleNamespace(
            kind="safetensors",
            path=target,
            num_tensors=2,
            nbytes=3000,
            source="run/step-8",
            has_config=False,
        )

    monkeypatch.setattr("planner.runtime.checkpoint.convert.convert", convert_files)
    return given


def test_a_conversion_is_said_in_a_line(converted, capsys):
    convert(Path("run"), Path("weights"), to=None, plan=None, model=None, shard_gb=0.5)
    assert (converted["kind"], converted["plan"], converted["graph"]) == (None, None, None)
    assert converted["shard_bytes"] == 500_000_000
    assert "safetensors weights: 2 tensors, 2.93 KiB, from run/step-8" in capsys.readouterr().out


@pytest.mark.parametrize("shard_gb", [float("nan"), float("inf")])
def test_shards_have_a_size(converted, shard_gb):
    with pytest.raises(PlannerError, match="use a number of GB, such as 5"):
        convert(Path("run"), Path("weights"), to=None, plan=None, model=None, shard_gb=shard_gb)
    assert not converted


def test_a_plan_has_its_model_beside_it(converted):
    with pytest.raises(PlannerError, match="--plan was given without its model"):
        convert(Path("a"), Path("b"), to=None, shard_gb=5.0, plan=Path("p.json"), model=None)
    assert not converted


def test_a_model_of_another_kind_is_said_to_have_no_config(converted, tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text("import torch\nmodel = lambda: torch.nn.Linear(2, 2)\nbatch = torch.zeros\n")
    convert(Path("run"), Path("weights"), to=None, plan=None, model=file, shard_gb=0.5)
    assert converted["model"].weight.is_meta
    assert "without config.json: the model of" in capsys.readouterr().out


# ---- emit


def emitted(tmp_path, view, **options) -> int:
    save_plan(view.plan, tmp_path / "plan.json")
    usual = {"model": None, "to": "torchrun", "out": tmp_path / "job", "accept": None}
    return emit(tmp_path / "plan.json", **usual | {"script": "train.py", "device": None} | options)


def test_scripts_can_be_run_and_configurations_not(tmp_path, capsys):
    assert emitted(tmp_path, view_of(), to="ray", script="my run.py") == 0
    script, driver = tmp_path / "job" / "torchrun.sh", tmp_path / "job" / "ray_driver.py"
    assert script.stat().st_mode & 0o111 == 0o111
    assert not driver.stat().st_mode & 0o111
    assert "'my run.py' \"$@\"" in script.read_text()
    assert f"wrote {script}" in capsys.readouterr().out
    # The plan itself is as it was.
    assert load_plan(tmp_path / "plan.json") == view_of().plan


def test_nothing_is_written_of_a_plan_that_is_refused(tmp_path, capsys):
    assert emitted(tmp_path, view_of(), to="deepspeed") == 2
    assert not (tmp_path / "job").exists()
    assert "planner: deepspeed can't express pp: " in capsys.readouterr().err


def test_a_plan_is_not_overwritten_by_what_is_written_of_it(tmp_path):
    view = view_of()
    (tmp_path / "job").mkdir()
    plan = tmp_path / "job" / "torchrun.sh"
    save_plan(view.plan, plan)
    with pytest.raises(PlannerError):
        emit(plan, model=None, to="torchrun", out=tmp_path / "job", accept=None, script="train.py",
             device=None)  # fmt: skip
    assert load_plan(plan) == view.plan


def test_a_device_is_one_of_two(tmp_path):
    with pytest.raises(PlanError, match="`device` tpu was given; use cpu or cuda"):
        emitted(tmp_path, view_of(), device="tpu")
    assert emitted(tmp_path, view_of(), device="cpu") == 0
    assert "PLANNER_DEVICE=cpu" in (tmp_path / "job" / "torchrun.sh").read_text()

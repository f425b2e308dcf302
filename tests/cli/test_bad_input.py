"""Bad input: one line that says what was given, the rule and what to try; exit code 2."""

import json
import multiprocessing.process
import os
import re
import subprocess
from pathlib import Path

import pytest

import profiles
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import load_plan, save_plan
from profiles.store import write_profile_file

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", "2", "--global-batch", "8")


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch):
    """Everything here must be refused before any process exists."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"a process was started: {args} {kwargs}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture(scope="module")
def found():
    """Texts of plans that this module has searched for."""
    return []


@pytest.fixture
def plan(planner, write_model, tmp_path, found):
    """A good plan, plan.json, for a good model, model.py, of two ranks."""
    model = write_model()
    file = tmp_path / "plan.json"
    if not found:
        done = planner("search", model, *SEARCH, "--dp", 2)
        assert done.code == 0, done.stderr
        found.append(file.read_text())
    file.write_text(found[0])
    return file


# Model files


def test_no_such_model_file(planner):
    complaint = planner("search", "nosuch.py", *SEARCH).complaint
    assert "nosuch.py does not exist" in complaint


@pytest.mark.parametrize("name", ["model", "batch"])
def test_model_file_without_a_function(planner, write_model, name):
    path = write_model()
    path.write_text(path.read_text().replace(f"def {name}(", "def something_else("))
    complaint = planner("search", path, *SEARCH).complaint
    assert f"defines no {name}()" in complaint


def test_model_file_that_fails_to_load(planner, write_model):
    path = write_model()
    path.write_text("import no_such_library\n" + path.read_text())
    complaint = planner("search", path, *SEARCH).complaint
    assert "line 1" in complaint
    assert "no_such_library" in complaint


def test_uncapturable_model_names_the_users_line(planner, write_model):
    """G2: not capturable; the line in the user's file, and what to write instead."""
    line = "x = x * 2 if x.sum() > 0 else x"
    path = write_model(body=line)
    number = path.read_text().splitlines().index(f"        {line}") + 1
    complaint = planner("search", path, *SEARCH).complaint
    assert f"model.py:{number}" in complaint
    assert line in complaint
    assert "torch.where" in complaint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys; sys.exit(3)", r"line 1: SystemExit: 3"),
        ("raise RuntimeError('boom')", r"line 1: RuntimeError: boom"),
        ("def model(:", r"line 1: SyntaxError"),
        ("def model(): return 3\ndef batch(size): return 1", r"model\(\) returned int"),
        (
            "import torch\ndef model(): return torch.nn.Linear(2, 2)\ndef batch(size): return 'ab'",
            r"returned str without a tensor in it; .* tuple or dict of tensors",
        ),
        (
            "import torch\ndef model(): return torch.nn.Linear(2, 2)\ndef batch(size): 1 / 0",
            r"batch\(2\) failed at .*model.py:3.* ZeroDivisionError",
        ),
    ],
)
def test_model_files_that_are_wrong(planner, tmp_path, text, says):
    path = tmp_path / "model.py"
    path.write_text(text)
    assert re.search(says, planner("search", path, *SEARCH).complaint)


# Numbers


@pytest.mark.parametrize(
    ("option", "text"), [("--global-batch", "many"), ("--memory-limit", "80GiB"), ("--gap", "big")]
)
def test_a_number_that_is_none_is_named(planner, write_model, option, text):
    complaint = planner("search", write_model(), *SEARCH, option, text).complaint
    assert option in complaint
    assert f"'{text}'" in complaint


def test_no_devices(planner, write_model):
    """V11: a number that means nothing is refused, never adjusted."""
    complaint = planner("search", write_model(), *SEARCH[:2], "--gpus", 0).complaint
    assert "--gpus 0" in complaint


@pytest.mark.parametrize("option", ["--gpus", "--microbatch-size"])
def test_more_than_plans_count(planner, write_model, option):
    given = {"--gpus": 2, "--global-batch": 2**22} | {option: 2**21}
    flat = [str(each) for pair in given.items() for each in pair]
    complaint = planner("search", write_model(), *SEARCH[:2], *flat).complaint
    assert f"{option} {2**21} was given; plans count to {2**20} of them" in complaint


def test_devices_that_do_not_divide_the_batch(planner, write_model):
    """V11: 7 devices cannot share 4 samples, and are not rounded to 4."""
    complaint = planner(
        "search", write_model(), *SEARCH[:2], "--gpus", 7, "--global-batch", 4
    ).complaint
    assert "7" in complaint
    assert "4" in complaint


def test_more_devices_than_the_profile_describes(planner, write_model, tmp_path):
    """G2: too few devices; a profile measured on 2 ranks says nothing of 4."""
    folder = tmp_path / "measured-on-two"
    file = profiles.load_profile("h100-sxm5-80gb").file
    cluster = file.cluster.model_copy(update={"max_devices": 2})
    write_profile_file(folder, file.model_copy(update={"cluster": cluster}))
    complaint = planner("search", write_model(), "--profile", folder, "--gpus", 4).complaint
    assert "4" in complaint
    assert "use --gpus 2 or fewer" in complaint


def test_fewer_microbatches_than_stages(planner, write_model):
    """P8: refused before launch, naming both numbers."""
    complaint = planner(
        "search", write_model(), *SEARCH, "--pp", 2, "--microbatch-size", 8
    ).complaint
    assert "pp=2 needs at least 2 microbatches" in complaint
    assert "at most 1" in complaint


def test_unknown_schedule_names_the_nearest(planner, write_model):
    """P10: the valid names and the nearest match."""
    complaint = planner("search", write_model(), *SEARCH, "--schedule", "1f2b").complaint
    assert "1f1b" in complaint
    assert "fthenb" in complaint


def test_degrees_that_do_not_multiply_to_the_devices(planner, write_model):
    """V11: asking pp=8 of 2 devices is an error, not a different plan."""
    complaint = planner("search", write_model(), *SEARCH, "--pp", 8).complaint
    assert "8" in complaint
    assert "2" in complaint


def test_memory_limit_below_zero(planner, write_model):
    assert (
        "--memory-limit -1"
        in planner("search", write_model(), *SEARCH, "--memory-limit", -1).complaint
    )


def test_place_that_cannot_be_written(planner, write_model, tmp_path):
    complaint = planner("search", write_model(), *SEARCH, "--out", tmp_path).complaint
    assert f"can't write the plan to {tmp_path}" in complaint


def test_a_device_or_a_pipe_is_written_to_and_stays_one(plan, tmp_path):
    """`--out /dev/null`, as root, must not put a file in its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save_plan(load_plan(plan), pipe)
        assert json.loads(os.read(reader, 1 << 20)) == json.loads(plan.read_text())
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_refusal_is_the_only_line_without_a_profile_too(planner):
    """The line about the profile chosen must not stand beside a refusal."""
    assert "does not exist" in planner("search", "nosuch.py", "--gpus", 2).complaint


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--forbid", "zb_v", "CHOICE=VALUE"),
        ("--solver", "magic", "dp, recursive, ilp"),
        ("--pin", "layers.0.weight", "S(0)@tp"),
        ("--pin", "layer.*: S(0)@tp", "matches no parameter"),
        ("--time-limit", "soon", "90s"),
        ("--time-limit", "nan", "90s"),
        ("--memory-limit", "inf", "GiB per device"),
        ("--gap", "nan", "0 or more"),
        ("--gap", "1.5", "below 1"),
        ("--precision", "fp99", "model, bf16, fp16, fp8, fp8-tensorwise, mxfp8 or auto"),
        ("--recompute", "sometimes", "none, selective or full"),
        ("--balance", "1,2", "deals 3 blocks and the model has 4"),
        ("--cp", "2", "use cp=1"),
        ("--pareto", "model.py/x.json", "model.py is a file"),
        ("--pareto-gpus", "2,x", "numbers of devices, such as 2,4,8"),
        ("--price", "inf", "per device and hour"),
        ("--allow", "schedule", "CHOICE=VALUE"),
        ("--receive-ahead", "-1", "it counts jobs: 0 or more"),
        ("--overlap", "all", "use auto, which chooses whether weight gradients are made beside"),
        ("--offload", "disk", "use auto, none, optimizer, activations, both or tables"),
    ],
)
def test_options_that_are_not_understood(planner, write_model, option, value, says):
    complaint = planner("search", write_model(), *SEARCH, option, value).complaint
    assert says in complaint


# Profiles


def test_unknown_profile_lists_the_shipped_ones(planner, write_model):
    complaint = planner("search", write_model(), "--gpus", 2, "--profile", "h101").complaint
    assert "h101" in complaint
    assert "h100-sxm5-80gb" in complaint


def test_profile_directory_without_its_file(planner, write_model, tmp_path):
    (tmp_path / "empty").mkdir()
    complaint = planner("search", write_model(), "--gpus", 2, "--profile", "empty").complaint
    assert "profile.json" in complaint


def test_profile_directory_of_garbage(planner, write_model, tmp_path):
    folder = tmp_path / "garbage"
    folder.mkdir()
    (folder / "profile.json").write_text("{ not json")
    complaint = planner("search", write_model(), "--gpus", 2, "--profile", folder).complaint
    assert "profile.json" in complaint


# Plans


@pytest.mark.parametrize("command", ["show", "verify", "launch"])
def test_no_such_plan(planner, write_model, command):
    path = write_model()
    complaint = planner(command, "nosuch.json", path).complaint
    assert "nosuch.json" in complaint


@pytest.mark.parametrize("command", ["show", "verify", "launch"])
def test_damaged_plan(planner, write_model, plan, command):
    plan.write_text(plan.read_text()[:-40])
    assert "plan.json" in planner(command, plan, "model.py").complaint


@pytest.mark.parametrize("command", ["show", "verify", "launch"])
def test_plan_of_a_newer_version(planner, plan, command):
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"version": 99}))
    complaint = planner(command, plan, "model.py").complaint
    assert "version 99" in complaint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 0}, "version"),
        ({"dp": -1}, "dp"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"stages": []}, "stage"),
        ({"precision": "fp99"}, "precision"),
        ({"zero_stage": 9}, "zero_stage"),
        ({"colour": "red"}, "colour"),
        ({"dp": 10**6}, "search with --gpus for what is here"),
        ({"dp": 10**9}, "damaged at dp"),
        ({"num_microbatches": 10**6, "vpp": 2}, "forwards of all stages"),
        ({"estimate": {"step_s": 1.0}}, "damaged at estimate"),
        ({"estimate": {"step_s": "1"}}, "damaged at estimate"),
    ],
)
def test_plans_that_were_edited_badly(planner, plan, change, says):
    """Also where nothing but the launcher looks."""
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    assert says in planner("launch", plan, "model.py").complaint


@pytest.mark.parametrize("command", ["show", "verify"])
def test_plan_for_another_model(planner, plan, write_model, command):
    other = write_model("other.py", width=16)
    complaint = planner(command, plan, other).complaint
    assert "search again" in complaint


@pytest.mark.parametrize("what", ["inputs", "params", "outputs", "ops", "class_index"])
def test_layouts_that_are_not_the_models(planner, write_model, what):
    """Counts of placements and names of ops must be those of the block class."""
    save_plan(default_plan(load_graph(write_model()), file="model.py", tp=2), "plan.json")
    data = json.loads(Path("plan.json").read_text())
    layout = next(each for each in data["layouts"] if each["ops"] and each["inputs"])
    if what == "class_index":
        layout[what] = 7
    elif what == "ops":
        layout[what][0][0] = "nosuch"
    else:
        layout[what] = [*layout[what], "R"]
    Path("plan.json").write_text(json.dumps(data))
    for command in ("show", "dryrun", "simulate"):
        assert "search again" in planner(command, "plan.json", "model.py").complaint


def test_no_such_training_script(planner, plan):
    assert "nosuch.py" in planner("launch", plan, "nosuch.py").complaint


def test_a_training_script_that_is_not_python(planner, plan):
    """X9: told before a process starts."""
    Path("train.py").write_text("import planner\nengine = planner.apply(\n")
    assert "train.py is not Python in line 2" in planner("launch", plan, "train.py").complaint


def test_plan_with_an_unknown_schedule(planner, plan):
    """P10: also when the plan was written by hand."""
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"schedule": "1f2b"}))
    assert "1f1b" in planner("launch", plan, "model.py").complaint


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate", "plan.json", "model.py", "--trace", "."), "can't write the trace to ."),
        (("launch", "--num-nodes", 3, "plan.json", "model.py"), "num_nodes=3 does not divide"),
        (("launch", "--device", "tpu", "plan.json", "model.py"), "use cpu or cuda"),
        (("launch", "--device", "cpu", "--devices", "0,1", "plan.json", "model.py"), "leave it"),
        (("launch", "--devices", "0,x", "plan.json", "model.py"), "for example 0,2,3"),
        (("profile", "--device", "tpu"), "use cpu or cuda"),
        (("dryrun", "plan.json", "model.py", "--rank", 5), "use 0 to 1"),
    ],
)
def test_options_of_other_commands(planner, plan, arguments, says):
    assert says in planner(*arguments).complaint


# Rows of runs


def test_rows_without_needed_columns(planner, tmp_path):
    """A row that cannot be predicted says why; the others may have what it lacks."""
    (tmp_path / "rows.csv").write_text("gpu,layers\nH100,32\n")
    done = planner("estimate", "--batch", "rows.csv", "--out", "out.csv")
    assert (done.code, done.stderr) == (0, "")
    assert "0 of 1 rows predicted" in done.stdout
    assert "column hidden is blank; an estimate needs it" in Path("out.csv").read_text()


def test_what_is_read_is_not_replaced(planner, tmp_path, write_model):
    """One line, and the file as it was."""
    rows = tmp_path / "rows.csv"
    rows.write_text("gpu,layers\nH100,32\n")
    complaint = planner("estimate", "--batch", "rows.csv", "--out", "./rows.csv").complaint
    assert "writing predictions to rows.csv would replace what is read" in complaint
    assert rows.read_text() == "gpu,layers\nH100,32\n"
    model = write_model()
    text = model.read_text()
    given = ("search", model, "--gpus", "2", "--profile", "h100-sxm5-80gb", "--out", model)
    assert "the plan" in planner(*given).complaint
    assert model.read_text() == text


def test_rows_into_a_folder_that_can_not_be_made(planner, tmp_path):
    columns = "stack,gpu,gpus,layers,hidden,heads,seq_len,vocab,global_batch,tp,pp"
    (tmp_path / "rows.csv").write_text(f"{columns}\nmegatron,H100-SXM,8,4,64,4,128,256,8,1,1\n")
    (tmp_path / "no").touch()
    complaint = planner("estimate", "--batch", "rows.csv", "--out", "no/such/out.csv").complaint
    assert "no is a file; name another file, in a folder you can write to" in complaint


def test_estimate_needs_a_plan_or_rows(planner):
    assert "PLAN and MODEL" in planner("estimate").complaint
    assert "--batch IN.csv --out OUT.csv" in planner("estimate", "--batch", "rows.csv").complaint

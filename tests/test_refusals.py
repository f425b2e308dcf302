"""Refusals that no other test reads, a call each: what was given, the rule, what to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.check import check
from commands.common.inputs import (
    parse_precision,
    parse_price,
    parse_seconds,
    profile_named,
)
from commands.common.long_run import LongRun
from commands.common.measured import check_measurable
from commands.common.question import parse_counts
from commands.emit import emit
from commands.estimate import estimate as estimate_command
from commands.launch import launch
from commands.what_if import what_if
from costmodel.table.rows.devices import device_of
from costmodel.table.rows.row_files import read_rows
from planner.capture.source.capture_cache import load_graph
from planner.capture.source.model_file import load_model_file
from planner.cluster import Tier
from planner.emit.megatron_options import parse_flags
from planner.errors import PlannerError
from planner.language.layout.axes import Axis, register_axis
from planner.language.layout.pins import class_pins, parse_pin
from planner.language.layout.placement import OpSharding
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.plugins import load_plugins, name_files
from planner.runtime.batches.count_tokens import count_tokens
from planner.runtime.batches.sampler import ShardedSampler
from planner.runtime.start.course import Keeping
from planner.runtime.start.launch import _check_script, check_listed
from planner.runtime.step_log import _sink
from profiles import load_cluster, load_profile, measure_profile
from search import SearchRequest
from tests.captures import capture_tiny

GPT = "gpt"


def request(**choices: Any) -> Callable[[], Any]:
    """Make a request with choices."""
    return lambda: SearchRequest(**{"num_devices": 2, "global_batch": 8, **choices})


def plan(**choices: Any) -> Callable[[], Any]:
    """Make a default plan of a tiny GPT."""
    return lambda: default_plan(capture_tiny(GPT), **choices)


def file(text: str, use: Callable[[Path], Any], name: str = "file.py") -> Callable[[Path], Any]:
    """Write a file and use it."""

    def made(folder: Path) -> Any:
        (folder / name).write_text(text)
        return use(folder / name)

    return made


def plugin(path: Path) -> None:
    """Load a plugin file."""
    name_files([path])
    load_plugins()


CLUSTER = """[[group]]
name = "{a}"
profile = "h100-sxm5-80gb"
nodes = 1
[[group]]
name = "{b}"
profile = "a100-sxm4-80gb"
nodes = 1
{more}
"""
TIMES = JobSeconds.of_stages(forward_s=(1.0,), backward_input_s=(1.0,), backward_weight_s=(1.0,))

REFUSED: dict[str, Callable[..., Any]] = {
    # The search's request
    "--gpus 0 was given; training needs at least one device": request(num_devices=0),
    "--pp 0 was given; it counts something, so it must be 1 or more": request(pp=0),
    "a memory limit of -1 bytes was given; it must be positive": request(memory_limit_bytes=-1),
    "--offload warm was given; use auto, none, optimizer": request(offload="warm"),
    "--meshes odd was given; use same (one dp and tp": request(meshes="odd"),
    "--measure 0 was given; it counts plans, so use 1 or more": request(num_best=0),
    "--solver ant was given; use one of": request(solver="ant"),
    "--gap 2 was given; a gap is a part of the step time": request(max_gap=2),
    "--allow and --forbid both name tp=2, which leaves no": request(
        allow=(("tp", "2"),), forbid=(("tp", "2"),)
    ),
    "--allow recompute=odd was given; use": request(allow=(("recompute", "odd"),)),
    "--allow tp=two was given; tp is a whole number": request(allow=(("tp", "two"),)),
    "--measure runs plans on this machine alone": lambda: check_measurable(
        load_profile("h100-sxm5-80gb"), 99
    ),
    # Options of commands
    "--gpus 0 was given; use 1 or more": lambda: check(flags="--bf16", gpus=0),
    "--slow-nodes '1,2' was given; give DAYS,HOURS,FACTOR": lambda: LongRun(
        node_mtbf=1, checkpoint_seconds=1, restart_seconds=1, slow_nodes="1,2"
    ).failures(),
    "--budget soon is not a time; write it like 90s, 5m, 1h or 30d": lambda: parse_seconds(
        "soon", "--budget"
    ),
    "--length x is not understood; write lengths": lambda: parse_counts("--length", "x", "lengths"),
    "were given; a cluster file names the profile of each of its groups": lambda: profile_named(
        "h100-sxm5-80gb", Path("cluster.toml")
    ),
    "rows say their machine by `gpu`; leave --profile out": lambda: estimate_command(
        batch=Path("a"), out=Path("b"), profile="h100"
    ),
    "--tokens -1 was given; it counts tokens, such as 1e12": lambda: what_if(
        Path("plan.json"), Path("model.py"), tokens=-1.0
    ),
    "the flags can't be read (No closing quotation); close its quotes": lambda: parse_flags("'"),
    "--price cheap is not understood; it is money per device and hour": lambda: parse_price(
        "cheap"
    ),
    "--precision odd was given; use model, bf16, fp16, fp8, ": lambda: parse_precision("odd"),
    "--node-mtbf was given; give --checkpoint-seconds and --restart-seconds with it": lambda: (
        LongRun(node_mtbf=1).failures()
    ),
    "--on-oom wait was given; use stop or replan": lambda folder: _launch(folder, on_oom="wait"),
    "--elastic and --on-oom replan go on from checkpoints; give --keep a folder": lambda folder: (
        _launch(folder, elastic=1)
    ),
    "--device tpu was given; use cpu or cuda": lambda: emit(Path("plan.json"), device="tpu"),
    "--to slurm writes a plan and none was given; give PLAN": lambda: emit(to="slurm"),
    # Model files and plugins
    "does not exist; give a .py file that defines model()": lambda: load_graph("none.py"),
    "is a directory; give a .py file that defines model()": lambda: load_model_file("."),
    "is not a Python file; give a .py file that defines model()": file(
        "", load_model_file, "model.txt"
    ),
    "failed to load: line 1: ZeroDivisionError": file("1 / 0", load_model_file),
    "model() of file.py was given size=2": file(
        "def model(): ...\ndef batch(n): ...",
        lambda path: load_model_file(path).with_arguments({"size": 2}),
    ),
    "no plugin none.py; give a Python file that registers what it adds": lambda: name_files(
        [Path("none.py")]
    ),
    "is not a Python file; name one that ends in .py": file("", plugin, "plugin.txt"),
    "can't be imported: ZeroDivisionError: division by zero": file("1 / 0", plugin),
    # Layouts and plans
    "axis 'dp' is there already; choose another name": lambda: register_axis(
        Axis(name="dp", divides="x", cuts_batch=True, whole_params=True), outside="dp"
    ),
    "a mesh of sizes (2,) needs 2 different ranks; 1 given": lambda: ProcessMesh(
        axes=("dp",), shape=(2,), ranks=(0,)
    ),
    "rank 7 is not in the mesh of ranks [0, 1]": lambda: ProcessMesh(
        axes=("dp",), shape=(2,), ranks=(0, 1)
    ).coordinate(7),
    "op sharding 'R' has no '->'; write it like R,S(0)->S(2)": lambda: OpSharding.parse("R"),
    "a parameter can't rest as a partial sum; use R or S(dim)": lambda: parse_pin("a: P@tp"),
    "disagree about": lambda: class_pins(
        capture_tiny(GPT), [parse_pin("*: S(0)@tp"), parse_pin("*: R@tp")]
    ),
    "makes 999 stages and the model has": plan(pp=999),
    "is for 1 stages and pp*vpp=2; give one number of blocks": plan(pp=2, balance=(3,)),
    "give one tp for each of the 2 stages, each a divisor": plan(
        pp=2, tp=4, by_stage={"tp": (3, 1)}
    ),
    "finds no such tensor in the batch, which has": lambda: count_tokens("y")({"x": torch.ones(1)}),
    "times of 1 stages given for schedule '1f1b' of 2 stages; give one": lambda: simulate(
        build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2), TIMES
    ),
    "stage times need one entry for each stage in all three lists": lambda: replace(
        TIMES, forward_s=(1.0, 2.0)
    ),
    # Launching
    "--max-restarts -1 was given; give 0 or more": lambda: Keeping(folder=Path(), max_restarts=-1),
    "--save-every 0 was given; give 1 or more": lambda: Keeping(folder=Path(), save_every=0),
    "no script none.py; give the Python file that trains the model": lambda: _check_script(
        Path("none.py")
    ),
    "is not Python in line 1: ": file("def", _check_script),
    "--devices 0 lists GPUs, and ranks run on the CPU; leave it away": lambda: check_listed(
        [0], 1, "cpu"
    ),
    "--devices 0,0 must name 2 different GPUs, one for each rank": lambda: check_listed(
        [0, 0], 2, "cuda"
    ),
    "there is no GPU 98; ": lambda: check_listed([98, 99], 2, "cuda"),
    "is not one of the 2 shards; use 0 to": lambda: ShardedSampler(
        num_samples=4, batch_size=1, shard_id=2, num_shards=2, seed=0
    ),
    "is no log; give": lambda: _sink("paper", None, is_used=True),
    # Machines
    "of cluster 'c' was given; use a figure above 0": lambda: _cluster(devices_per_node=0),
    "list each once, the smallest first": lambda: _cluster(
        tiers=tuple(Tier(devices=4, link=_link()) for _ in range(2))
    ),
    "has several groups called 'a'; give each a `name` of its own": file(
        CLUSTER.format(a="a", b="a", more=""), load_cluster, "c.toml"
    ),
    "has a group called 'a+b'; plans join names of groups by +": file(
        CLUSTER.format(a="a+b", b="c", more=""), load_cluster, "c.toml"
    ),
    "no profile 'h9000'; ": lambda: load_profile("h9000"),
    "is a file; give the profile's directory or a shipped name": file("", load_profile),
    "has no inter-node link 'rope'; use one of: ": lambda: load_profile("h100-sxm5-80gb@rope"),
    "nproc=0 is not a number of processes; use at least 1": lambda: measure_profile("x", nproc=0),
    "has no profile.json, so it is not a profile; make one with": lambda folder: load_profile(
        folder
    ),
    "is not a profile (no format 'planner-profile'); give the directory of one": file(
        "{}", lambda path: load_profile(path.parent), "profile.json"
    ),
    # Rows of runs
    "column gpu is blank; an estimate needs it, so name the device of the run": lambda: device_of(
        " "
    ),
    "gpu 'abacus' is not one we have data for; known: ": lambda: device_of("abacus"),
    "no file none.csv; give a CSV of runs": lambda: read_rows(Path("none.csv")),
    "is not readable ([Errno 21] Is a directory": lambda: read_rows(Path(".")),
}


def _launch(folder: Path, **options: Any) -> None:
    save_plan(default_plan(capture_tiny(GPT), dp=2), folder / "plan.json")
    launch(folder / "plan.json", Path("train.py"), **options)


def _link() -> Any:
    return load_profile("h100-sxm5-80gb").cluster.inter_node


def _cluster(**changes: Any) -> Any:
    return replace(load_profile("h100-sxm5-80gb").cluster, name="c", **changes)


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_says_what_was_given_the_rule_and_what_to_try(says, tmp_path, monkeypatch):
    from commands.render.flags import with_flags

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_PLUGINS", "")
    call = REFUSED[says]
    takes_folder = call.__code__.co_argcount == 1
    with pytest.raises(PlannerError) as refused:
        call(tmp_path) if takes_folder else call()
    told = with_flags(str(refused.value))
    assert says in told
    assert "\n" not in told

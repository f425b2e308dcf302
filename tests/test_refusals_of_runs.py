"""Refusals of starting and running a plan, of profiles, prices, requests and commands, a call each.

Each compares the whole text where no path or number of the machine stands in it.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commands.check import check
from commands.common.inputs import parse_precision
from commands.common.question import parse_counts
from commands.estimate import estimate as estimate_command
from commands.page.asked import parse_form
from commands.profile import _device
from commands.render.console import check_writable
from commands.render.flags import with_flags
from commands.ui import _listening
from commands.what_if import _counts_in_range, _numbers, what_if
from costmodel.cache import CostCache
from costmodel.execution import execution, find_execution
from costmodel.failures import Failures
from costmodel.planned_rates import planned_seconds
from costmodel.table import kernels
from costmodel.table.rows.row_files import read_rows
from planner.errors import PlannerError
from planner.language.graph import TensorMeta
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, save_plan
from planner.language.schedule.registry import register_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.templates import Transformer, build_transformer
from planner.runtime.batches.inputs.feed import cut_batch
from planner.runtime.initial.build import without_values
from planner.runtime.process.device import device_type
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.state.weights import shape_of
from planner.runtime.step.engine import Engine
from planner.runtime.step_log import StepLog
from profiles import devices, load_cluster, load_profile
from profiles.records import SCHEMA_VERSION, OpRecord
from profiles.store import _columns, read_ops, read_profile_file, read_session
from search import SearchRequest
from search.space.request_checks import validate_request
from tests.captures import capture_tiny

MACHINE = "h100-sxm5-80gb"
CLUSTER = """[[group]]
name = "old"
profile = "a100-sxm4-80gb"
nodes = 1
[[group]]
name = "new"
profile = "h100-sxm5-80gb"
nodes = 1
[between]
gb_per_s = 5
latency_us = 12
"""
NO_TOKENS = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 8))


def loss(output, batch):
    return output.square().mean()


def batch(size):
    return (torch.zeros(size, 8),)
"""
ANY: Any = None
"""What is not reached before the refusal."""


def gpt() -> Any:
    """Return the graph of a tiny GPT."""
    return capture_tiny("gpt")


def request(**choices: Any) -> SearchRequest:
    """Return a request for two devices and eight samples, with choices."""
    return SearchRequest(**{"num_devices": 2, "global_batch": 8, **choices})


def fitting(**choices: Any) -> None:
    """Check a request against a tiny GPT and a cluster."""
    validate_request(request(**choices), gpt(), load_profile(MACHINE).cluster)


def written(text: str | bytes, name: str, use: Callable[[Path], Any]) -> Callable[[], Any]:
    """Write a file of this name and use it."""

    def made() -> Any:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return use(path)

    return made


@contextmanager
def one_rank() -> Iterator[None]:
    """Be a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def started(plan: Plan) -> None:
    """Join a plan's ranks as a single process."""
    with one_rank():
        build_mesh(plan, torch.device("cpu"))


def engine(*, num_lacking: int = 0, **options: Any) -> None:
    """Make an engine of a tiny GPT, whose graph lacks so many of the last blocks of the plan."""
    graph = gpt()
    plan = default_plan(graph)
    kept = graph.blocks[: len(graph.blocks) - num_lacking]
    with one_rank():
        mesh = build_mesh(plan, torch.device("cpu"))
        Engine(plan, replace(graph, blocks=kept), nn.Linear(1, 1), mesh, **options)


def short_labels() -> None:
    """Cut a batch whose labels are shorter than those of the capture."""
    graph = gpt()
    ids = torch.zeros(2, 16, dtype=torch.long)
    cut_batch({"ids": ids, "labels": ids[:, :5]}, graph, default_plan(graph))


def parameter(name: str) -> TensorMeta:
    """Return a parameter of a graph."""
    return TensorMeta(name=name, shape=(2,), dtype="float32", kind="param", fqn=name)


def taken_port() -> None:
    """Listen to a port that another socket listens to."""
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        with _listening(first.getsockname()[1]):
            pass


def tokens_of_no_tokens() -> None:
    """Ask for the cost of tokens of a model whose batch has none."""
    from planner.capture.source.capture_cache import load_graph

    Path("model.py").write_text(NO_TOKENS)
    save_plan(default_plan(load_graph("model.py")), "plan.json")
    what_if(Path("plan.json"), Path("model.py"), tokens=1e9)


OPS = ",".join(_columns(OpRecord))

REFUSED: dict[str, Callable[[], Any]] = {
    # Starting
    "the function given to planner.apply returned dict; return an nn.Module": lambda: (
        without_values(dict, has_weights=False)
    ),
    "device 'abacus' is unknown; use cpu or …, which this PyTorch has": lambda: device_type(
        "abacus"
    ),
    "the plan is for 2 ranks (pp=1 dp=2…) and 1 are running; "
    "start it with: planner launch plan.json script.py": lambda: started(default_plan(gpt(), dp=2)),
    "the model has no param 'head', which the plan has; "
    "apply the plan to the model it was made for": lambda: shape_of(
        nn.Linear(2, 2), parameter("head")
    ),
    # Steps
    "max_grad_norm=0 must be positive, or None not to clip": lambda: engine(max_grad_norm=0),
    "the plan's stages end with block 5 and the model's last block is 4; search again": lambda: (
        engine(num_lacking=1)
    ),
    "the batch tensor labels has shape (2, 5); for 2 samples, as ids has, "
    "it must be (2, 16)": short_labels,
    "every=0 must be at least 1: the steps between two lines": lambda: StepLog(ANY, every=0),
    # Schedules and templates
    "schedule '1f1b' is registered already; give yours another name": lambda: register_schedule(
        "1f1b"
    ),
    "transfer_s has 2 entries; 2 stages have 1 boundaries": lambda: JobSeconds.of_stages(
        forward_s=(1.0, 1.0),
        backward_input_s=(1.0, 1.0),
        backward_weight_s=(1.0, 1.0),
        transfer_s=(0.1, 0.1),
    ),
    "ahead=1 is of code='modules'; leave it out": lambda: build_transformer(
        Transformer(
            layers=2,
            hidden=8,
            heads=2,
            kv_heads=2,
            ffn_hidden=16,
            vocab=8,
            seq_len=4,
            ahead=1,
            code="huggingface",
        )
    ),
    # Profiles
    "c.toml is wrong at group.0.nodes: Input should be greater than or equal to 1; "
    "write it as docs/profiles.md shows": written(
        CLUSTER.replace("nodes = 1", "nodes = 0", 1), "c.toml", load_cluster
    ),
    "p/profile.json is not readable JSON (Expecting value: line 1 column 1 (char 0)); "
    "delete p and profile again": written(
        "no", "p/profile.json", lambda path: read_profile_file(path.parent)
    ),
    "p/profile.json is damaged at name: …; mend it, or profile again": written(
        json.dumps({"format": "planner-profile", "version": SCHEMA_VERSION}),
        "p/profile.json",
        lambda path: read_profile_file(path.parent),
    ),
    "p/measuring.json is not readable JSON (Expecting value: line 1 column 1 (char 0)); "
    "delete it and run again": written(
        "no", "p/measuring.json", lambda path: read_session(path.parent)
    ),
    "profile p has no ops.csv; profile again, or restore the file": lambda: read_ops(Path("p")),
    "p/ops.csv is not readable CSV (…); profile again into a new directory": written(
        b"\xff", "p/ops.csv", lambda path: read_ops(path.parent)
    ),
    "p/ops.csv line 2 has 1 fields instead of …; delete that line, or profile again": written(
        f"{OPS}\nx\n", "p/ops.csv", lambda path: read_ops(path.parent)
    ),
    "p/ops.csv line 2 is damaged at a list of numbers: not JSON (…); "
    "mend or delete that line, or profile again": written(
        f"{OPS}\n{','.join('x' for _ in OPS.split(','))}\n",
        "p/ops.csv",
        lambda path: read_ops(path.parent),
    ),
    # Prices
    f"a stage of the plan lies on devices of group 'old' and the cluster {MACHINE!r} has no "
    "groups; give the `cluster` file that the plan was searched for": lambda: CostCache(
        gpt(), load_profile(MACHINE)
    ).of_group("old"),
    "the plan lies on devices of no named group and the cluster 'c' has old, new; "
    "give the `cluster` file that it was searched for": written(
        CLUSTER, "c.toml", lambda path: planned_seconds(default_plan(gpt()), load_cluster(path))
    ),
    "execution 'ours-eagre' is unknown; "
    "did you mean 'ours-eager'? valid names of runtimes: …": lambda: find_execution("ours-eagre"),
    "checkpoint_s is 0; it must be above 0 seconds": lambda: Failures(
        node_mtbf_s=1, checkpoint_s=0, restart_s=0
    ),
    "rows.csv is not a readable CSV (…); write it as CSV again": written(
        f'gpu,layers\n"{"x" * ((1 << 24) + 1)}"\n', "rows.csv", read_rows
    ),
    "no file none.csv; give a CSV of runs, with column gpu": lambda: read_rows(Path("none.csv")),
    ". is not readable ([Errno 21] Is a directory: '.'); give a CSV of runs": lambda: read_rows(
        Path(".")
    ),
    # Requests of a search
    "--offload warm was given; use auto, none, optimizer, activations, both or tables, "
    "which say what the host's memory holds": lambda: request(offload="warm"),
    "--precision odd was given; use model, bf16, fp16, fp8, "
    "fp8-tensorwise or mxfp8; model keeps the dtypes of the model file": lambda: request(
        precision="odd"
    ),
    "--allow recompute=odd was given; use none, selective, …, the ways to recompute": lambda: (
        request(allow=(("recompute", "odd"),))
    ),
    "--forbid zero=7 was given; ZeRO stages are 0, 1, 2 and 3: write zero=0 to zero=3": lambda: (
        request(forbid=(("zero", "7"),))
    ),
    "dp=2 * …pp=1 uses 2 of --gpus 4; … must equal 4, so leave one of them out or use --gpus 2": (
        lambda: fitting(num_devices=4, dp=2, tp=1, cp=1, pp=1)
    ),
    "--microbatch-size 3 does not divide the 4 samples of a replica; use a divisor: 1, 2, 4": (
        lambda: fitting(dp=2, microbatch_size=3)
    ),
    # Commands
    "flags.txt is not readable (…); give a text of flags": written(
        b"\xff", "flags.txt", lambda path: check(flags=str(path), gpus=1)
    ),
    "--precision fp4 was given; use model, bf16, fp16, fp8, fp8-tensorwise or mxfp8; model …": (
        lambda: parse_precision("fp4")
    ),
    "--length 0 is not understood; write lengths (whole numbers above 0)": lambda: parse_counts(
        "--length", "0", "lengths"
    ),
    "PLAN was not given; give PLAN and MODEL, or --batch IN.csv --out OUT.csv": estimate_command,
    "MODEL was not given; give PLAN and MODEL, or --batch IN.csv --out OUT.csv": lambda: (
        estimate_command(plan=Path("plan.json"))
    ),
    "give PLAN and MODEL, or --batch IN.csv --out OUT.csv, not both": lambda: estimate_command(
        plan=Path("plan.json"), batch=Path("in.csv"), out=Path("out.csv")
    ),
    "--gpus many was given; it is a whole number, written like 8": lambda: parse_form(
        {"gpus": "many"}, Path()
    ),
    "link_rate fast was given; it is a number, written like 0.5": lambda: parse_form(
        {"link_rate": "fast"}, Path()
    ),
    "can't write the trace to .: it is a directory; "
    "name another file, in a folder you can write to": lambda: check_writable(Path(), "the trace"),
    "--port … was given, but …; give another, or --port 0 for a free one": taken_port,
    "--gpus 8..2 is not understood; the first of a range is the least: "
    "write numbers of devices, such as 16,32, or a range that doubles, such as 8..1024": lambda: (
        _counts_in_range("8..2")
    ),
    "--link-rate fast is not understood; write rates (numbers above 0)": lambda: _numbers(
        "--link-rate", "fast", "rates"
    ),
    "--tokens was given, but the batch has no tokens "
    "(no [samples, length] tensor of whole numbers); leave --tokens out": tokens_of_no_tokens,
}
"""What is told (… stands for any text), and what is refused so."""


def check_told(says: str, call: Callable[[], Any]) -> None:
    """Check the whole text of a refusal."""
    with pytest.raises(PlannerError) as refused:
        call()
    told = with_flags(str(refused.value))
    assert re.fullmatch(".*".join(map(re.escape, says.split("…"))), told), told


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_says_what_was_given_the_rule_and_what_to_try(says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_told(says, REFUSED[says])


def test_a_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_told(
        "--device cuda was given and torch finds no GPU here; use --device cpu",
        lambda: _device("cuda"),
    )


def test_damaged_files_of_the_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "DATA", tmp_path)
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "broken.json").write_text("no")
    check_told(
        "….json is damaged (Expecting value: line 1 column 1 (char 0)); restore it",
        lambda: devices.device_file("broken"),
    )


def test_a_record_of_a_runtime_without_its_constants(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "DATA", tmp_path)
    record = {"values": {name: {} for name in (*execution._FIELDS, "odd")}}
    (tmp_path / "odd-record.json").write_text(json.dumps(record))
    (tmp_path / "bare-record.json").write_text('{"values": {}}')
    check_told(
        "execution record odd-record.json has unknown odd; restore it",
        lambda: find_execution("odd-record"),
    )
    check_told(
        "execution record bare-record.json lacks …; restore it",
        lambda: find_execution("bare-record"),
    )


def test_training_rates_that_lack_some(monkeypatch):
    profile = load_profile(MACHINE)
    shipped = devices.device_file(MACHINE)
    lacking = shipped.shipped.training.model_copy(update={"rates": {}})
    device = shipped.shipped.model_copy(update={"training": lacking})
    monkeypatch.setattr(
        kernels, "device_file", lambda name: shipped.model_copy(update={"shipped": device})
    )
    check_told(
        f"the training rates of {MACHINE} lack {', '.join(kernels.FITTED)}; restore its file",
        lambda: kernels.load_rates(profile),
    )

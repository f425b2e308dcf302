"""Refusals of capturing, layouts, plan files, checkpoints and data, a small call each.

Like `tests.test_refusals`: each message is compared whole, or from its first fixed word on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from planner.capture import capture_module, capture_source
from planner.capture.checks.functions import FunctionCalls
from planner.capture.opaque.trial import Place, Trial
from planner.capture.reading.read import Reader
from planner.capture.reading.record import Recorder
from planner.capture.reading.writes import pure_form
from planner.capture.source.model_file import load_model_file
from planner.emit.emitter import EMITTERS, find_emitter, register_emitter
from planner.errors import PlannerError
from planner.integrations.prepare import PreparedOptimizer, prepare
from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.language.layout.axes import Axis, Degrees
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Shard, parse_placement
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import check_experts
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_layout
from planner.language.ops.registry import strategies
from planner.language.ops.users import register_rule, unregister_rule
from planner.language.plan import load_plan, save_plan
from planner.language.templates import Experts, Transformer, build_transformer
from planner.plugins import load_plugins, name_files
from planner.runtime.batches.loader import Loader
from planner.runtime.batches.streams import WholeStream
from planner.runtime.checkpoint import folder as folders
from planner.runtime.checkpoint.checkpoints import Checkpoints
from planner.runtime.checkpoint.convert import kind_of
from planner.runtime.checkpoint.optimizer_state import OptimizerNotes, state_key
from planner.runtime.checkpoint.snapshot import check_extra
from planner.runtime.checkpoint.weight_files.safetensors_files import Named, write_file
from planner.runtime.checkpoint.weight_files.single_device import to_state_dict
from planner.runtime.checkpoint.weight_files.sources import CheckpointSource, MappedSource, fill
from planner.runtime.proofs.verify import verify
from profiles import load_profile
from tests.runtime.alone import Parts

aten = torch.ops.aten
SIZES = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn_hidden": 16, "vocab": 16,
         "seq_len": 4}  # fmt: skip
MODEL = build_transformer(Transformer(**SIZES))
SPARSE = build_transformer(
    Transformer(**SIZES, experts=Experts(number=8, per_token=2, width=4, shared=1))
)
BLOCK = MODEL.classes[1].bind(1)
WHOLE = {"class_index": 1, "inputs": ("R",) * len(BLOCK.inputs),
         "params": ("R",) * len(BLOCK.params), "outputs": ("R",) * len(BLOCK.outputs),
         "ops": ()}  # fmt: skip
PLAN = default_plan(MODEL, num_microbatches=2, microbatch_size=2)
HELD = SimpleNamespace(plan=PLAN, mesh=Parts({}, {}))
FEEDER = SimpleNamespace(reads=frozenset(), pad=None)
"""What a loader and checkpoints read before they begin."""


# ------------------------------------------------------------------------------------- captures


class Adds(nn.Module):
    """A forward with a random number, a count, or a tensor that it stores."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "stores":
            self.last = x
        elif self.what == "changes":
            self.count += 1
        return x + 1.0


def tried(what: str) -> Callable[[], Any]:
    """Try a call of such a module."""
    given = torch.empty(4, 3, device="meta")
    return lambda: Trial(
        module=Adds(what), precision="model", who="it", key="it", places=((Place(0),), ()),
        given=[given], num_samples=2, first=None,
    ).run()  # fmt: skip


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)
        return x.float().sum()


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand(2)


def draws_in_a_function() -> None:
    """Run a function that draws, as an export does."""
    with torch._subclasses.FakeTensorMode() as mode, FunctionCalls().recorded():
        Draws.apply(mode.from_tensor(torch.ones(2)))


def reader() -> tuple[Reader, torch.fx.Node]:
    """A reader with a record of x [2, 3] and p [4, 3], and a node."""
    made = Reader(None, nn.Module(), (), made=None, calls=(), modules=None, reached=())
    made.record, made._envs = Recorder(), []
    made.record.tensor("x", torch.ones(2, 3), kind="activation")
    made.record.tensor("p", torch.ones(4, 3), kind="param")
    return made, torch.fx.Graph().placeholder("x")


def writes(op: Any, *names: str) -> Callable[[], Any]:
    """Make an op in place pure."""

    def call() -> Any:
        read, node = reader()
        return pure_form(read.record, node, op, tuple(map(Ref, names)))

    return call


def writes_a_larger_result() -> None:
    read, node = reader()
    read._emit_written(node, aten.neg.default, "x", (Ref("p"),), ())


def an_op_of_python() -> None:
    graph = torch.fx.Graph()
    graph.call_function(torch.sym_not, (True,))
    graph.output(())
    reader()[0]._run(torch.fx.GraphModule(nn.Module(), graph), {})


def source(text: str, folder: Path) -> Any:
    (folder / "model.py").write_text(text)
    return load_model_file(folder / "model.py")


EXITS = """import torch
class Exits(torch.nn.Linear):
    def forward(self, x):
        return exit()
def model(): return Exits(2, 2)
def batch(size): return torch.ones(size, 2)
"""
FAILS = "import torch\ndef model(): {}\ndef batch(size): raise KeyError(size)\n"

# -------------------------------------------------------------------------------- the other rooms


def lowered(**changes: Any) -> Callable[[], Program]:
    """Lower a block of 2 heads on 7 ranks."""
    return lambda: lower(BLOCK, ClassLayout(**{**WHOLE, **changes}), axis="tp", axis_size=7)


def no_count() -> None:
    """Cut an op whose rule divides a count that is none."""
    torch.library.define("mine_uncounted::op", "(Tensor x, float heads) -> Tensor")
    register_rule("mine_uncounted::op", "bh -> bh", divided={"heads": "h"})
    target = "mine_uncounted.op.default"
    metas = {
        name: TensorMeta(
            name=name, shape=(2, 8), dtype="float32", kind="activation", requires_grad=True
        )
        for name in ("x", "y")
    }
    try:
        strategies(Op(name="op", target=target, args=(Ref("x"), 2.5), outputs=("y",)), metas, 2)
    finally:
        unregister_rule("mine_uncounted.op")


def saved(text: str, folder: Path) -> Path:
    (folder / "plan.json").write_text(text)
    return folder / "plan.json"


def damaged_plan(folder: Path) -> None:
    path = saved("", folder)
    save_plan(PLAN, path)
    load_plan(saved(path.read_text().replace('"dp": 1', '"dp": 0', 1), folder))


def without_rights(folder: Path) -> None:
    save_plan(PLAN, saved("", folder) / "plan.json")


def plugin(folder: Path) -> None:
    text = "from planner.emit.emitter import find_emitter\nfind_emitter('megatro')\n"
    (folder / "own.py").write_text(text)
    name_files([folder / "own.py"])
    load_plugins()


def checks_no_steps(folder: Path) -> None:
    save_plan(PLAN, folder / "plan.json")
    (folder / "model.py").write_text(FAILS.format("..."))
    verify(folder / "plan.json", folder / "model.py", steps=0)


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint whose file is missing."""
    return folders.commit(
        folders.begin(folder),
        folders.Manifest(
            step=1, samples=1, precision="model", ranks="1", model="m", fingerprint="0", state={},
            files={"part": (1, 0)},
        ),
    )  # fmt: skip


def damaged_manifest(folder: Path) -> None:
    (folder / folders.MANIFEST).write_text("{")
    folders.read_manifest(folder)


def state_of_pieces() -> None:
    notes = OptimizerNotes(groups=[{"params": ["w"], "options": {}}], states={"rows"})
    stored = {state_key("rows", "w", is_shaped=True) + "@0": None}
    to_state_dict(notes, ["w"], stored, lambda key: key)


def fill_another_shape() -> None:
    part = SimpleNamespace(
        holding=SimpleNamespace(meta=SimpleNamespace(fqn="w")), piece=SimpleNamespace(shape=(2,))
    )
    fill([part], {}, MappedSource({"w": torch.ones(3)}))


def stream_without_samples() -> None:
    stream = WholeStream(
        [], collate=None, split=PLAN.split, least=1, replicas=(1, 0), at_end="wrap", seed=0,
        epoch=0, start=0,
    )  # fmt: skip
    next(iter(stream))


REFUSED: dict[str, Callable[..., Any]] = {
    # Captures
    "draws random numbers (aten.rand.default); draw them outside, and pass them as an argument": (
        draws_in_a_function
    ),
    "model.py: model() failed at ": lambda folder: capture_source(
        source(FAILS.format("return 1 / 0"), folder)
    ),
    "raise SystemExit(5)`: SystemExit: 5": lambda folder: capture_source(
        source(FAILS.format("raise SystemExit(5)"), folder)
    ),
    "`return exit()`: torch.export says SystemExit": lambda folder: capture_source(
        source(EXITS, folder)
    ),
    "model.py: the example batch(2) failed at ": lambda folder: capture_source(
        source(FAILS.format("return torch.nn.Linear(1, 1)"), folder)
    ),
    "it, changes count; return what it computes, as a plan repeats one forward in every step": (
        tried("changes")
    ),
    "it, stores a tensor in last, which is not registered; return it from forward": tried("stores"),
    "the model writes a result of shape (4, 3) into a tensor of shape (2, 3); write the "
    "out-of-place form": writes_a_larger_result,
    "the model uses wrap_with_autocast": lambda: capture_module(
        Autocast(), torch.ones(2, 3), torch.ones(3, 3)
    ),
    "the model uses sym_not, which can't be planned; use plain tensor operations": an_op_of_python,
    "the model writes in place into p; write the out-of-place form (x = x + y)": writes(
        aten.add_.Tensor, "p", "x"
    ),
    "the in-place op aten.fill_diagonal_.default has no pure form; write the out-of-place ": writes(
        aten.fill_diagonal_.default, "x"
    ),
    "model file none.py does not exist; give a .py file that defines model()": lambda: (
        load_model_file("none.py")
    ),
    # Machines, emitters and plugins
    "memory_bytes=0 of cluster 'c' was given; use a figure above 0": lambda: replace(
        load_profile("h100-sxm5-80gb").cluster, name="c", memory_bytes=0
    ),
    "no target is called 'megatro'; did you mean 'megatron-lm'? valid names: ": lambda: (
        find_emitter("megatro")
    ),
    "an emitter is called 'megatron-lm' already; choose another name": lambda: register_emitter(
        EMITTERS["megatron-lm"]
    ),
    "own.py was not loaded: no target is called 'megatro'; ": plugin,
    # Layouts
    "tp=3 does not divide the 8 ranks of a stage; use sizes whose product does": lambda: Degrees(
        dp=4, tp=2
    ).with_own((("tp", 3),)),
    "axis a copies shards, so each of its ranks needs all parameters; set whole_params": lambda: (
        Axis(name="a", divides="x", cuts_batch=False, whole_params=False, copies_shards=True)
    ),
    "ep=4 * etp=1 does not divide the 2 ranks of a stage (": lambda: check_experts(
        SPARSE, Degrees(dp=2, ep=4)
    ),
    "the layout places op none, which ": lowered(ops=(("none", "R->R"),)),
    "the layout has placements of 0 params but ": lowered(params=()),
    "can't be cut as S(0): dim 0 of ": lowered(params=("S(0)",) * len(BLOCK.params)),
    "placement 'T' is unknown; use R, P or S(dim), for example S(0)": lambda: parse_placement("T"),
    "can't be placed S(0) on 7 ranks; use R": lambda: propagate_layout(
        1, BLOCK, 7, pins={BLOCK.params[0]: Shard(0)}
    ),
    "heads of mine_uncounted.op is 2.5, no count to be divided; leave it out of the "
    "rule's `divided`": no_count,
    # Files of plans
    "plan.json is not readable JSON (Expecting value: line 1 column 1 (char 0)); search again to "
    "make it": lambda folder: load_plan(saved("", folder)),
    "plan.json is damaged at dp: Input should be greater than or equal to 1; search again for it": (
        damaged_plan
    ),
    "File exists; choose a folder you can write to": without_rights,
    "steps=0 must be at least 1 step of training": checks_no_steps,
    # Checkpoints and weights
    "keep=0 must be at least 1: the checkpoint just written": lambda: Checkpoints(HELD).save(
        Path(), keep=0, extra={}
    ),
    "kind 'gguf' is unknown; a conversion makes checkpoint, safetensors, state-dict, training": (
        lambda: kind_of(MappedSource({}), Path("a"), "gguf")
    ),
    "planner.json is damaged (Expecting property name enclosed in double quotes: line 1 column 2 "
    "(char 1)); use another checkpoint": damaged_manifest,
    "the checkpoint has no extra 'rate' (it has none); give load what save was given": lambda: (
        check_extra({"rate": nn.Module()}, SimpleNamespace(extra={}))
    ),
    "w is torch.complex128, which safetensors do not have; write a .pt file": lambda folder: (
        write_file(folder / "a", [Named("w", (1,), torch.complex128, lambda: torch.ones(1))])
    ),
    "the optimizer's rows of w was saved for pieces of it; convert to a state-dict, which holds "
    "the model alone": state_of_pieces,
    "; give another checkpoint": lambda folder: CheckpointSource(checkpoint(folder)),
    "w has shape (3,) there and (2,) in the model; load weights of this model": fill_another_shape,
    # Data
    "at_end='stop' is no end of a pass; use 'wrap', 'drop', 'short'": lambda: Loader(
        HELD.plan, HELD.mesh, FEEDER, [], at_end="stop"
    ),
    "the DataLoader has batch_size=3 and the plan's global batch is 4; give it that batch_size, or "
    "search with --global-batch=3": lambda: Loader(
        HELD.plan, HELD.mesh, FEEDER, DataLoader([1, 2, 3], batch_size=3)
    ),
    "the data gave no sample; a loader needs some": stream_without_samples,
    "optimizer.step(closure) evaluates the model in it; leave it out": lambda: PreparedOptimizer(
        None,
        None,
    ).step(operator.truth),
    "the DataLoader gives no batches; make it with a batch_size": lambda: prepare(
        PLAN,
        nn.Module(),
        None,
        DataLoader([1], batch_size=None),
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_says_what_was_given_the_rule_and_what_to_try(says, tmp_path, monkeypatch):
    from commands.render.flags import with_flags

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_PLUGINS", "")
    call = REFUSED[says]
    takes_folder = getattr(call, "__code__", None) is not None and call.__code__.co_argcount == 1
    with pytest.raises(PlannerError) as refused:
        call(tmp_path) if takes_folder else call()
    told = with_flags(str(refused.value))
    assert says in told
    assert "\n" not in told

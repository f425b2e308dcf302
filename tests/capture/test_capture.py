"""Capture turns unmodified modules into graphs whose sizes follow the microbatch size."""

import functools
import json
import operator
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import planner.capture
from planner.capture.module import batch_from_spec, capture_module, capture_source
from planner.capture.source.capture_cache import load_graph
from planner.capture.source.model_file import load_model_file
from planner.errors import CaptureError, ModelError
from planner.language.graph import Affine, Ref, Symbol, bind_arg, from_json, to_json
from planner.language.plan import batch_spec
from planner.runtime.stage.calls import local_ops
from tests import captures
from tests.builders import (
    PlainGPT,
    gpt_batch,
    telling_first,
    tiny_models,
)


def capture(build, batch, **options):
    with torch.device("meta"):
        module = build()
    return capture_module(module, batch(2), batch(3), **options)


@functools.cache
def graph_of(name):
    tiny = tiny_models()[name]
    return capture(tiny.build, tiny.batch, loss=tiny.loss)


def interpret(graph, module, batch):
    """Run a graph op by op with real weights: the loss that its plain data describes."""
    size = next(iter(batch.values() if isinstance(batch, dict) else batch)).shape[0]
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    flat = batch if isinstance(batch, dict) else {str(i): t for i, t in enumerate(batch)}
    values = {}
    for meta in graph.tensors:
        if meta.kind == "input":
            values[meta.name] = flat[meta.fqn]
        elif meta.kind in ("param", "buffer"):
            values[meta.name] = held[meta.fqn]
        elif meta.kind == "constant":
            dtype = getattr(torch, meta.dtype)
            values[meta.name] = torch.tensor(meta.data, dtype=dtype).reshape(meta.shape_at(size))
    values |= run(graph.preamble, values, size)
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        names = (*program.inputs, *program.params)
        local = {n: values[a] for n, a in zip(names, (*block.inputs, *block.params), strict=True)}
        result = run(program, local, size)
        values |= {a: result[n] for n, a in zip(program.outputs, block.outputs, strict=True)}
    return values[graph.loss]


def run(program, values, size):
    values = dict(values)

    def resolve(arg):
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Symbol):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.value)
        return tuple(map(resolve, arg)) if isinstance(arg, tuple) else arg

    for op in program.ops:
        library, _, name = op.target.partition(".")
        ours = library == "planner"
        call = getattr(local_ops, name) if ours else operator.attrgetter(op.target)(torch.ops)
        args = resolve(bind_arg(op.args, size))
        out = call(*args, **{k: resolve(bind_arg(v, size)) for k, v in op.kwargs})
        outs = out if isinstance(out, tuple | list) else (out,)
        for name, value in zip(op.outputs, outs, strict=True):
            assert tuple(value.shape) == program.tensor[name].shape_at(size)
            assert str(value.dtype) == f"torch.{program.tensor[name].dtype}"
            values[name] = value
    return values


@pytest.mark.parametrize("name", telling_first())
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_graph_computes_what_its_module_computes(name, size):
    """M20, M22, P11: every captured op at its place, at batch sizes that were never captured."""
    tiny = tiny_models()[name]
    if tiny.needs_transformers:
        pytest.importorskip("transformers")
    if name == "batchnorm-mlp" and size == 1:
        pytest.skip("batch statistics of one sample do not exist")
    torch.manual_seed(0)
    module = tiny.build()
    graph = graph_of(name)
    batch = tiny.batch(size)
    output = module(**batch) if isinstance(batch, dict) else module(*batch)
    expected = output if isinstance(output, torch.Tensor) else output.loss
    torch.testing.assert_close(interpret(graph, module, batch), expected, rtol=1e-5, atol=1e-6)


def test_layers_of_a_gpt_are_blocks_of_one_class():
    graph = graph_of("gpt")
    assert [block.name for block in graph.blocks] == [
        "token",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "norm",
    ]
    assert [block.class_index for block in graph.blocks] == [0, 1, 1, 1, 1, 2]
    layer = graph.classes[1]
    assert {layer.tensor[p].fqn for p in layer.params} >= {"attention.q.weight", "up.bias"}
    assert layer.tensor[layer.inputs[0]].shape == (Affine(1), 16, 32)


def test_sizes_follow_the_microbatch():
    graph = graph_of("gpt")
    tail = graph.classes[2]
    merged = next(t for t in tail.tensors if t.shape == (Affine(16), 64))
    assert merged.shape_at(3) == (48, 64)
    assert tail.bind(3).tensor[merged.name].shape == (48, 64)
    assert graph.num_params() == sum(p.numel() for p in PlainGPT().parameters())


def test_tied_weights_are_one_parameter_with_two_names():
    pytest.importorskip("transformers")
    graph = graph_of("hf-gpt2")
    (tied,) = (t for t in graph.params if t.aliases)
    assert {tied.fqn, *tied.aliases} == {"transformer.wte.weight", "lm_head.weight"}
    users = [block.index for block in graph.blocks if tied.name in block.params]
    assert users == [0, len(graph.blocks) - 1]


def test_rotary_tables_are_computed_by_every_stage():
    """G8: values of the batch alone are side inputs in the preamble, not sent."""
    pytest.importorskip("transformers")
    graph = graph_of("hf-llama")
    assert len(graph.preamble.outputs) == 2  # cos, sin
    assert not any(t.requires_grad for t in graph.preamble.tensors)
    assert all(t.kind != "param" for t in graph.preamble.tensors)
    only_cos = graph.preamble.only(graph.preamble.outputs[:1])
    assert 0 < len(only_cos.ops) < len(graph.preamble.ops)


def test_skips_reach_the_block_that_uses_them():
    """G8: a value may be used by several later blocks, not only by the next."""
    graph = graph_of("unet")
    first = graph.producer[graph.blocks[0].outputs[0]]
    users = [b.index for b in graph.blocks if set(b.inputs) & set(graph.blocks[first].outputs)]
    assert max(users) > first + 1


def test_capture_leaves_the_module_alone_and_needs_no_copy_of_its_weights():
    module = PlainGPT()
    before = {n: (p.data_ptr(), p.clone()) for n, p in module.named_parameters()}
    graph = capture_module(module, gpt_batch(2), gpt_batch(3))
    assert graph.fingerprint == capture(PlainGPT, gpt_batch).fingerprint
    for name, param in module.named_parameters():
        assert param.data_ptr() == before[name][0]
        assert torch.equal(param, before[name][1])


def test_fingerprint_is_of_the_structure():
    graph = graph_of("gpt")
    assert graph.fingerprint == capture(PlainGPT, gpt_batch).fingerprint
    assert graph.fingerprint != capture(lambda: PlainGPT(layers=3), gpt_batch).fingerprint


def test_json_round_trip_keeps_everything():
    graph = graph_of("unet")
    again = from_json(json.loads(json.dumps(to_json(graph))))
    assert again == graph
    assert again.fingerprint == graph.fingerprint


def test_a_batch_can_be_made_again_from_its_spec():
    graph = graph_of("mlp")
    batch = batch_from_spec(batch_spec(graph), graph.batch_tree, 7)
    assert isinstance(batch, tuple)
    assert [tuple(t.shape) for t in batch] == [(7, 8), (7, 4)]


class Branches(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x).mean()


class Shifts(nn.Linear):
    """Writes through slices, as T5 shifts its labels."""

    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[:, 0] = 3.0
        y += 1
        return super().forward(y).square().mean()


class StaleView(nn.Linear):
    def forward(self, x):
        y = x * 1
        view = y[:, 1:]
        y[:, 0] = 1.0
        return super().forward(y).mean() + view.mean()


class SizeInFloat(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum() * (1.0 / x.shape[0])


class Unrolls(nn.Linear):
    def forward(self, x):
        for row in x:
            x = x + row
        return super().forward(x).mean()


class MakesItsOwn(nn.Linear):
    """Forward makes tensors as a script for one CPU does: no device, or another's, and lists."""

    def forward(self, x):
        positions = torch.arange(4)
        mask = torch.tril(torch.ones(4, 4, device="cpu")) * torch.tensor([1.0, 2.0, 0.5, 1.0])
        x = x.cpu() + mask[2].to("cpu") + positions * torch.tensor(0.5, device=x.device)
        x[:, [1]] = x.new_tensor([4.0])
        x = torch.cat([x[:, [0, 2]], x[:, np.array([3])], x[:, [False, True, False, False]]], 1)
        return (super().forward(x) * torch.as_tensor(np.array([1.0, float("inf")]))[0]).mean()


class CountsItsBatch(nn.Linear):
    def forward(self, x):
        return (super().forward(x) / torch.tensor([x.shape[0]])).sum()


class MakesLegacyTensors(nn.Linear):
    def forward(self, x):
        return super().forward(x * torch.Tensor([1.0, 2.0, 3.0, 4.0])).mean()


def square_batch(size):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(0))


def test_in_place_writes_through_slices_become_pure():
    graph = capture(lambda: Shifts(4, 4), square_batch)
    module = Shifts(4, 4)
    batch = (square_batch(5),)
    actual = interpret_single(graph, module, batch[0])
    torch.testing.assert_close(actual, module(batch[0]))
    assert all(not op.target.split(".")[1].endswith("_") for c in graph.classes for op in c.ops)


def test_what_forward_makes_is_captured_with_its_values():
    """D22, M22: a forward written for one device needs no device=, and may hold numbers."""
    graph, module = capture(lambda: MakesItsOwn(4, 4), square_batch), MakesItsOwn(4, 4)
    torch.testing.assert_close(
        interpret_single(graph, module, square_batch(5)), module(square_batch(5))
    )


def interpret_single(graph, module, tensor):
    return interpret(graph, module, {"batch": tensor})


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Branches, r"test_capture\.py:\d+: `if x\.sum\(\) > 0:`.*torch\.where"),
        (StaleView, r"reads a view at .*test_capture\.py:\d+.*out-of-place"),
        (SizeInFloat, r"must not depend on the batch size"),
        (Unrolls, r"ops on 2 samples and \d+ on 3"),
        (CountsItsBatch, r"other numbers for 2 samples than for 3"),
        (MakesLegacyTensors, r"test_capture\.py:\d+: .*use torch\.tensor"),
    ],
)
def test_a_model_that_cannot_be_captured_names_the_line(module, says):
    with pytest.raises(CaptureError, match=says):
        capture(lambda: module(4, 4), square_batch)


def test_loss_must_be_a_scalar():
    with pytest.raises(ModelError, match=r"not a scalar loss; .* define loss\(output, batch\)"):
        capture(lambda: nn.Linear(4, 4), square_batch)


def write_model(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


MODEL = """
import torch
def model():
    return torch.nn.Linear({width}, 4)
def batch(size):
    return torch.zeros(size, {width})
def loss(output, batch):
    return output.square().mean()
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def batch(size): return None", r"defines no model\(\); add a function"),
        ("def model(): return None", r"defines no batch\(\)"),
        ("import nothing_of_this_name", r"failed to load: line 1: ModuleNotFoundError"),
        ("def model(:", r"failed to load: line 1: SyntaxError"),
    ],
)
def test_model_file_errors_are_one_line(tmp_path, text, says):
    with pytest.raises(ModelError, match=says) as caught:
        load_model_file(write_model(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_model_that_returns_no_module_is_refused(tmp_path):
    path = write_model(tmp_path, "def model(): return 3\ndef batch(size): return None")
    with pytest.raises(ModelError, match=r"returned int; return an nn\.Module"):
        capture_source(load_model_file(path))


def test_captures_are_kept_until_the_model_changes(tmp_path, monkeypatch):
    """P27: an equal file is a hit; a changed width, or a changed imported file, a miss."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_model(tmp_path, MODEL.format(width=6))
    graph = load_graph(path)
    with monkeypatch.context() as patch:
        patch.setattr(planner.capture, "capture_source", None)  # a hit never captures
        assert load_graph(path) == graph
    path.write_text(MODEL.format(width=8))
    assert load_graph(path).fingerprint != graph.fingerprint
    for entry in (tmp_path / "cache").rglob("*.json"):
        entry.write_text("{}")
    assert load_graph(path).num_params() == 8 * 4 + 4


READS_WHILE_BUILDING = """
import os
from pathlib import Path

import torch
def model():
    width = int(os.environ.get("WIDTH", "6"))
    if "DEEP" in os.environ:
        return torch.nn.Sequential(torch.nn.Linear(width, 5), torch.nn.Linear(5, 4))
    try:
        with open(Path(__file__).parent / "out.txt") as file:
            out = int(file.read())
    except FileNotFoundError:
        out = 4
    return torch.nn.Linear(width, out)
def batch(size):
    import sizes
    return torch.zeros(size, sizes.LENGTH, int(os.getenv("WIDTH", "6")))
def loss(output, batch):
    return output.square().mean()
"""


def test_a_kept_capture_is_not_used_when_a_fresh_one_would_differ(tmp_path, monkeypatch):
    """P27, N2: files and variables that model() and batch() read, and files that appear."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is kept when is shown here: equal models are exported once.
    monkeypatch.setattr("planner.capture.module.capture_module", captures.capture_module)
    for name in ("WIDTH", "DEEP"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sizes.py").write_text("LENGTH = 3")
    path = write_model(tmp_path, READS_WHILE_BUILDING)

    def fresh():
        sys.modules.pop("sizes", None)
        return load_graph(path, use_cache=False)

    def is_kept():
        """Whether the kept capture is used, which must equal a fresh one."""
        with monkeypatch.context() as patch:
            captures = []
            patch.setattr(
                planner.capture,
                "capture_source",
                lambda *args, **options: captures.append(1) or capture_source(*args, **options),
            )
            sys.modules.pop("sizes", None)
            assert load_graph(path) == fresh()
            return len(captures) == 1  # the fresh one's

    assert not is_kept()
    assert is_kept()
    monkeypatch.setenv("WIDTH", "7")
    assert not is_kept()
    monkeypatch.setenv("DEEP", "1")
    assert not is_kept()
    monkeypatch.delenv("DEEP")
    assert not is_kept()
    (tmp_path / "out.txt").write_text("5")
    assert not is_kept()
    assert is_kept()
    (tmp_path / "out.txt").write_text("6")
    assert not is_kept()
    (tmp_path / "sizes.py").write_text("LENGTH = 11")
    assert not is_kept()
    version = metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: version(name) + "1" * (name == "pluggy"))
        assert not is_kept()
    assert not is_kept()
    assert is_kept()

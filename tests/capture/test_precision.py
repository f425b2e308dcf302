"""V14: precision "bf16" captures the cast model, with dtypes brought together as autocast does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.capture.modes.precision import cast_parameters, mixed_dtypes
from planner.capture.source.capture_cache import load_graph
from planner.language.plan import batch_spec
from tests.builders import tiny_models
from tests.capture.test_capture import interpret


def capture_cast(module, batch, loss=None):
    return capture_module(module, batch(2), batch(3), loss=loss, precision="bf16")


@pytest.mark.parametrize("name", ["gpt", "batchnorm-mlp"])
def test_parameters_become_bf16_and_the_loss_stays_fp32(name):
    tiny = tiny_models()[name]
    module = tiny.build()
    graph = capture_cast(module, tiny.batch)
    plain = capture_module(module, tiny.batch(2), tiny.batch(3))
    assert {t.dtype for t in graph.params} == {"bfloat16"}
    assert {t.dtype for t in plain.params} == {"float32"}
    assert graph.tensor[graph.loss].dtype == "float32"
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert [t.dtype for t in graph.tensors if t.kind == "buffer"] == [
        t.dtype for t in plain.tensors if t.kind == "buffer"
    ]
    assert batch_spec(graph) == batch_spec(plain)
    assert graph.fingerprint != plain.fingerprint
    # The cut is that of the model, so a layout for one is a layout for the other.
    assert [b.class_index for b in graph.blocks] == [b.class_index for b in plain.blocks]
    # Values agree with the model in fp32 to bf16's eight bits.
    batch = tiny.batch(4)
    expected = module(**batch) if isinstance(batch, dict) else module(*batch)
    cast = tiny.build()
    cast.load_state_dict(module.state_dict())
    for param in cast.parameters():
        param.data = param.data.bfloat16()
    found = interpret(graph, cast, batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)


class Positions(nn.Module):
    """A fp32 buffer joins the stream, which then meets a bf16 norm and a bf16 product."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second = nn.Linear(4, 1, bias=False)
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x, target):
        x = self.first(x) + self.table
        return F.mse_loss(self.norm(x) @ self.second.weight.t(), target)


def test_mixed_dtypes_meet_in_bf16_but_targets_are_never_rounded():
    def batch(size):
        return {"x": torch.linspace(-1, 1, size * 4).view(size, 4), "target": torch.ones(size, 1)}

    module = Positions()
    graph = capture_cast(module, batch)
    for param in module.parameters():
        param.data = param.data.bfloat16()
    odd = batch(2) | {"target": torch.full((2, 1), 1000.5)}  # bf16 has 1000 and 1004
    x, weight = odd["x"].bfloat16(), module.second.weight
    x = module.norm((module.first(x) + module.table).bfloat16()) @ weight.t()
    torch.testing.assert_close(
        interpret(graph, module, odd), F.mse_loss(x.float(), odd["target"]), rtol=0, atol=0
    )


def test_the_cache_keeps_a_capture_for_each_precision(tmp_path, monkeypatch):
    """P27."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        return self.fc(x).square().mean()\n"
        "def model():\n    return M()\n"
        "def batch(size):\n    return (torch.ones(size, 4),)\n"
    )
    first = {p: load_graph(file, precision=p).fingerprint for p in ("model", "bf16")}
    assert first["model"] != first["bf16"]
    assert len(list((tmp_path / "cache" / "planner" / "captures").iterdir())) == 2
    monkeypatch.setattr("planner.capture.capture_source", None)  # nothing is captured again
    assert {p: load_graph(file, precision=p).fingerprint for p in first} == first


@pytest.mark.parametrize("statistics", [True, False])
def test_batch_norm_of_an_fp32_input_takes_fp32_weights(statistics):
    """A CPU or GPU kernel runs on what the capture makes: one dtype, or all but x in fp32."""
    norm = cast_parameters(nn.BatchNorm1d(4, track_running_stats=statistics), "bf16")
    x = torch.linspace(-1, 2, 8).view(2, 4)
    expected = nn.BatchNorm1d(4, track_running_stats=statistics)(x)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        with mixed_dtypes("bf16"):
            found = norm(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def vectors():
    short, long = torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1 / 3)
    table = torch.zeros(3, 3)
    rows = torch.tensor([0])
    return {
        "dot": lambda: torch.dot(short, long),
        "inner": lambda: torch.inner(long, short),
        "cross": lambda: torch.linalg.cross(short, long),
        "lerp": lambda: torch.lerp(long, short, 0.5),
        "cdist": lambda: torch.cdist(table, short[None]),
        "index_add": lambda: table.index_add(0, rows, short[None]),
        "index_put": lambda: table.index_put((rows,), short[None]),
        "scatter_add": lambda: table.scatter_add(0, torch.zeros(1, 3).long(), short[None]),
    }


@pytest.mark.parametrize("name", list(vectors()))
def test_kernels_of_one_dtype_beside_products_compute_in_the_widest(name):
    call = vectors()[name]
    with pytest.raises(RuntimeError):  # without the mode there is no such call
        call()
    with mixed_dtypes("bf16"):
        assert call().dtype == torch.float32


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 4),
        nn.GRU(4, 4),
        nn.GRUCell(4, 4),
        nn.PReLU(4),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_take_float_features_of_a_batch(layer):
    """The first layer of a model of time series gets fp32 from the batch; autocast casts it."""
    x = torch.linspace(-1, 1, 12).view(3, 4)
    expected = layer(x)
    with mixed_dtypes("bf16"):
        found = cast_parameters(copy.deepcopy(layer), "bf16")(x)
    found, expected = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.memory = nn.BatchNorm1d(4), nn.LSTM(4, 4)

    def forward(self, x, target):
        return F.mse_loss(self.memory(self.norm(x))[0], target)


def test_a_recurrent_model_of_float_features_is_captured_in_bf16():
    def batch(size):
        x = torch.linspace(-1, 1, size * 4).view(size, 4)
        return {"x": x, "target": x.flip(0)}

    module = Recurrent()
    expected = module(**batch(4))
    graph = capture_cast(module, batch)
    found = interpret(graph, cast_parameters(copy.deepcopy(module), "bf16"), batch(4))
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=0)

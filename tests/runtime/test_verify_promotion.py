"""Both sides of `verify` compute in fp64 or complex128, whatever dtypes a model names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.errors import ModelError
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.promote import (
    ReferenceMode,
    held_tensors,
    promote_graph,
    promote_module,
)
from planner.runtime.proofs.verify import compare_with_one_process
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_module
from tests.runtime.test_verify_faults import WIDTH, Drifting, graph_of, source_of, verify_here


class Rotating(nn.Module):
    """What Llama 4 does: positions as complex64 numbers, from a buffer and in forward.

    Beside it a plain attribute, and (which no capture takes part of) a list and a dict.
    """

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        angles = torch.linspace(0.1, 1.3, WIDTH // 2)
        self.register_buffer("turned", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("hidden", angles / 3, persistent=False)
        self.plain = torch.polar(torch.ones_like(angles), 2 * angles)
        self.listed = [torch.linspace(0.3, 0.7, WIDTH)]
        self.mapped = {"scale": torch.linspace(0.1, 0.9, WIDTH)}

    def forward(self, x, z, target):
        y = self.inner(x)
        pairs = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2))
        angle = self.hidden * 2.0
        made = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        pairs = (pairs * self.turned * self.plain * made).to(dtype=torch.complex64)
        y = torch.view_as_real(pairs).flatten(-2).type_as(y)
        return F.mse_loss(self.outer(y), target)


def test_a_model_that_computes_in_complex64_is_the_same_to_the_last_digits():
    """N3: metas, casts, buffers, plain attributes and their containers, on both sides."""
    report = verify_here(Rotating, steps=2)
    assert report.passed, report
    promoted = promote_graph(graph_of(Rotating))
    assert "complex64" not in repr(promoted)
    assert "float32" not in repr(promoted)


class Casting(nn.Module):
    """Every way to name a shorter dtype in a forward, and what depends on a dtype."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, z, target):
        y = self.inner(x)
        casts = [
            y.float(),
            y.half().float(),
            y.bfloat16().to(torch.float32),
            y.to(torch.float16).type_as(y),
            y.to("cpu", torch.bfloat16).to(y),
            y.type(torch.float32),
            y.cfloat().real,
            y.to(torch.complex64).abs(),
            F.softmax(y, -1, dtype=torch.float32),
            torch.sum(y, -1, keepdim=True, dtype=torch.float32),
            y * torch.arange(WIDTH, dtype=torch.float32).sqrt(),
            y * torch.arange(WIDTH).float().sqrt(),
            y * torch.arange(WIDTH).to(y).sqrt(),
            y * torch.full((WIDTH,), 0.1),
            y * torch.full((WIDTH,), 0.1, dtype=torch.get_default_dtype()),
            y * torch.tensor([0.1] * WIDTH),
            y * torch.tensor(0.3, dtype=torch.bfloat16),
            y * torch.as_tensor([0.7] * WIDTH, dtype=torch.float32),
            y * y.new_tensor([0.9] * WIDTH),
            y * torch.tensor(0.7, dtype=y.dtype),
            y.clamp(min=torch.finfo(y.dtype).eps * 1e6),
            y / (y.abs() + torch.finfo(torch.float32).eps * 1e5),
            y.masked_fill(y > 0.5, torch.finfo(y.dtype).min).softmax(-1),
            torch.ones_like(y, dtype=torch.float16) / 3 * y,
        ]
        total = torch.stack([c.to(torch.float32).expand_as(y) for c in casts]).mean(0)
        return F.mse_loss(self.outer(total), target)


def test_every_named_dtype_is_promoted():
    """N3: casts by name, by method, by type and by string; numbers rounded as the model does."""
    report = verify_here(Casting, steps=2)
    assert report.passed, report


@pytest.mark.parametrize("kind", ["torch.FloatTensor", torch.HalfTensor, torch.bfloat16])
def test_a_cast_by_tensor_type_is_promoted(kind):
    """N3: these mean the CPU too, so a capture takes them only where all that follows is there."""
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with ReferenceMode():
        assert torch.equal(x.type(kind), x)
        assert x.type() == "torch.DoubleTensor"
        assert x.type("torch.LongTensor").dtype == torch.int64


def test_a_short_tensor_from_outside_the_module_is_promoted_where_it_enters():
    """N3: made at import, or by a constructor that no mode sees; a write into it stays one."""
    outside = torch.tensor([[1 / 3]])
    x = torch.tensor([[1 / 3]], dtype=torch.float64)
    with ReferenceMode():
        assert (x @ outside).dtype == torch.float64
        assert torch.cat([x, outside, torch.FloatTensor([[0.1]])]).dtype == torch.float64
        outside.add_(1.0)
    assert outside.dtype == torch.float32
    assert outside.item() > 1


def test_limits_of_a_dtype_are_those_the_model_would_see():
    """N3: fp64 stands in for the model's own dtype; outside, nothing has changed."""
    given = torch.finfo
    with ReferenceMode(torch.float32):
        assert torch.finfo(torch.float64).eps == given(torch.float32).eps
        assert torch.finfo(torch.complex128).eps == given(torch.float32).eps
        assert torch.finfo(torch.bfloat16).max == given(torch.bfloat16).max
    with ReferenceMode(torch.bfloat16):
        assert torch.finfo(torch.float64).min == given(torch.bfloat16).min
    with pytest.raises(ZeroDivisionError), ReferenceMode():
        raise ZeroDivisionError
    assert torch.finfo is given


def test_numbers_of_a_tensors_dtype_are_rounded_as_the_model_would():
    """N3: fp64 read from a tensor stands for the model's own dtype; fp64 by name is fp64."""

    def as_read(x):
        return torch.tensor(0.1, dtype=x.dtype).item()

    def by_name():
        return torch.tensor(0.1, dtype=torch.float64).item()

    x = torch.ones(1, dtype=torch.float64)
    for own in (torch.float32, torch.bfloat16):
        rounded = torch.tensor(0.1, dtype=own).item()
        with ReferenceMode(own):
            assert as_read(x) == rounded
            assert by_name() == 0.1
    assert as_read(x) == 0.1


def test_the_reference_neither_rounds_nor_drops():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)
            self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            y = torch.softmax(x.to(torch.bfloat16), -1, dtype=torch.float32)
            y = F.dropout(y + x.half(), 0.5)
            y = self.attention(y, y, y)[0] + F.dropout1d(y, 0.5)
            return self.recurrent(y)[0]

    torch.manual_seed(0)
    module = Dropping()
    promote_module(module)
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    with ReferenceMode():
        y = module(x)
    assert y.dtype == torch.float64
    module.eval()
    expected = torch.softmax(x, -1) + x
    expected = module.attention(expected, expected, expected)[0] + expected
    torch.testing.assert_close(y, module.recurrent(expected)[0], rtol=1e-14, atol=1e-14)


class Recurrent(nn.Module):
    """Dropout inside recurrent layers and inside attention."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.5, batch_first=True)

    def forward(self, x, z, target):
        y = self.recurrent(self.attention(x[:, None] * z[:, :, None]))[0]
        return F.mse_loss(y[:, 0], target)


def test_dropout_inside_recurrent_layers_and_attention_is_off_on_both_sides():
    """N3: it is an argument of the op there, not an op of its own."""
    report = verify_here(Recurrent)
    assert report.passed, report
    assert "dropout was switched off on both sides" in report.notes


def test_each_tensor_stays_the_object_it_is():
    """N3: hooks and ties live on parameters, so promoting replaces none."""
    module, other = Rotating(), Rotating()
    before = held_tensors(module)
    promote_module(module, other)
    after = held_tensors(module)
    assert all(after[name] is tensor for name, tensor in before.items())
    for name, value in held_tensors(other).items():
        assert value.dtype in (torch.float32, torch.complex64)
        assert torch.equal(after[name].to(value.dtype), value)
        assert after[name].dtype in (torch.float64, torch.complex128)


def test_a_model_that_is_another_each_time_is_refused():
    widths = iter(range(2, 9))
    with pytest.raises(
        ModelError, match=r"called twice makes models that differ in bias, weight; verify"
    ):
        promote_module(nn.Linear(2, next(widths)), nn.Linear(2, next(widths)))
    module = Drifting()

    def build() -> nn.Module:
        return module

    with pytest.raises(ModelError, match="returns the same parameters; verify trains one model"):
        verify_here(build)


def test_two_builds_need_not_draw_alike():
    """N3: the values are those of one of them, also of buffers that are not saved."""
    calls = iter(range(10))

    def build() -> nn.Module:
        torch.manual_seed(next(calls))
        module = Rotating()
        with torch.no_grad():
            for tensor in held_tensors(module).values():
                tensor.mul_(1 + torch.rand(()).item())
        return module

    source: ModelSource = source_of(build)
    assert not torch.equal(source.build().inner.weight, source.build().inner.weight)
    assert verify_here(build).passed


class CastingFunction(torch.autograd.Function):
    """Computes in single precision, in its forward and in its own backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (2 * grad.float() * torch.cos(x.float())).to(grad.dtype)


class OwnBackward(MlpWithTarget):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(CastingFunction.apply(self.fc0(x)), target)

    def __init__(self) -> None:
        super().__init__()
        self.fc0 = nn.Linear(8, 8)


def test_casts_inside_an_autograd_function_are_promoted_on_both_sides():
    """N1, N3: its forward and its backward, which autograd calls."""
    source = ModelSource(
        path=Path("own_backward"), build=OwnBackward, batch=mlp_batch, loss=None, dependencies=()
    )
    graph = capture_module(OwnBackward(), mlp_batch(2), mlp_batch(3))
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2, accept=("unknown-ops",))
    report = compare_with_one_process(plan, source, steps=2, graph=graph)
    assert report is not None
    assert report.passed
    assert report.gradient.relative < 1e-13

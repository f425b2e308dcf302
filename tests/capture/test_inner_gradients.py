"""A gradient that a forward takes itself is in the graph, and trains through it a second time.

The graph's loss and gradients are those of the module, whose inner gradient autograd takes (fp64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.capture import capture_module
from planner.errors import CaptureError
from tests.capture.masks.attending import loss_of_graph
from tests.constructs import RoundedThrough

WIDTH, LENGTH = 4, 6

Inner = Callable[["Differentiated", Tensor], Tensor]


class Differentiated(nn.Module):
    """A small network of [samples, LENGTH, WIDTH], whose loss reads the gradient of its energy."""

    def __init__(self, inner: Inner, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.inner, self._loss = inner, loss or _of_forces
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norm, self.groups = nn.LayerNorm(WIDTH), nn.GroupNorm(2, LENGTH)
        self.batch_norm, self.convolved = nn.BatchNorm1d(LENGTH), nn.Conv1d(LENGTH, LENGTH, 3)
        self.table = nn.Embedding(LENGTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self, self.before(x))).squeeze(-1)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return self._loss(self, x, wanted)


def grad(outputs: Any, inputs: Any, **options: Any) -> Tensor:
    return torch.autograd.grad(outputs, inputs, create_graph=True, **options)[0]


def _of_forces(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """Energies and forces, as force fields are trained."""
    x = x.detach().requires_grad_(True)
    energy = self.output(x).flatten(1).sum(1)
    forces = -grad(energy.sum(), x)
    return F.mse_loss(forces, wanted) + 0.1 * energy.square().mean()


def _of_second_derivatives(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """An equation that the output obeys, as physics-informed networks are trained."""
    x = x.requires_grad_(True)
    u = self.output(x)
    first = grad(u, x, grad_outputs=torch.ones_like(u))
    second = grad(first[..., 0], x, grad_outputs=torch.ones_like(u))[..., 0]
    return (second + u * first[..., 1] - wanted[..., 0]).square().mean()


def _of_a_norm(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """A penalty on gradients, at inputs between two."""
    between = (0.3 * x + 0.7 * wanted).requires_grad_()
    gradient = grad(self.output(between).sum(), between)
    return (gradient.flatten(1).norm(2, dim=1) - 1).square().mean() - self.output(x).mean()


def _without_graph(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """A step along the gradient, which does not train through it."""
    x = x.requires_grad_()
    u = self.output(x)
    (step,) = torch.autograd.grad(u.sum(), x, retain_graph=True)
    return F.mse_loss(self.output(x - 0.1 * step), wanted[..., 0]) + u.mean()


def _of_several(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """Of several results for several inputs, parameters among them, one of them unused."""
    x, other = x.requires_grad_(), wanted.detach().requires_grad_()
    u, v = self.output(x), self.output(x + other).square()
    found = torch.autograd.grad(
        [u, v],
        [x, other, self.before.weight, self.table.weight],
        [torch.cos(u), torch.ones_like(v)],
        create_graph=True,
        allow_unused=True,
    )
    assert found[3] is None
    return sum(each.square().sum() for each in found[:2]) / len(x) + found[2].square().sum() / 100


def _through_no_grad(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    """What is computed without a gradient is a constant, and so is what is detached."""
    x = x.requires_grad_()
    u = self.output(x)
    with torch.no_grad():
        scale = u.abs() + 1
    return grad((u / scale * (u.detach() + x[..., 0])).sum(), x).square().mean()


def _of_hessian_products(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    x = x.requires_grad_()
    gradient = grad(self.output(x).square().sum(), x)
    return grad(gradient, x, grad_outputs=wanted).square().mean()


LOSSES = {
    "forces": _of_forces,
    "second derivatives": _of_second_derivatives,
    "norm of the gradient": _of_a_norm,
    "without a graph": _without_graph,
    "several": _of_several,
    "no_grad": _through_no_grad,
    "product with a Hessian": _of_hessian_products,
}


def _in_place(self: Differentiated, x: Tensor) -> Tensor:
    y = torch.tanh(x) * 2
    return F.relu(y.add_(0.1).mul_(0.7), inplace=True) * x


def _attended(self: Differentiated, x: Tensor) -> Tensor:
    each = x.unflatten(-1, (2, 2)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        made = F.scaled_dot_product_attention(each, each, each.cos(), is_causal=True)
    return made.transpose(1, 2).flatten(2)


def _neighbours(self: Differentiated, x: Tensor) -> Tensor:
    """Messages along edges of a graph in each sample."""
    source, target = torch.tensor([0, 1, 2, 5]), torch.tensor([1, 2, 0, 3])
    apart = (x[:, source] - x[:, target]).square().sum(-1, keepdim=True)
    return torch.zeros_like(x).index_add(1, target, torch.exp(-apart) * x[:, source])


def _several_results(self: Differentiated, x: Tensor) -> Tensor:
    high, places = x.topk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return (
        torch.cat([high * variance, left.sin() * right - mean], dim=-1) + places.sum(-1)[..., None]
    )


INNER: dict[str, Inner] = {
    "tanh": lambda self, x: torch.tanh(x),
    "sigmoid": lambda self, x: torch.sigmoid(x),
    "silu": lambda self, x: F.silu(x),
    "gelu": lambda self, x: F.gelu(x),
    "gelu by tanh": lambda self, x: F.gelu(x, approximate="tanh"),
    "softplus": lambda self, x: F.softplus(x, beta=2.0),
    "elu": lambda self, x: F.elu(x) * x,
    "leaky relu": lambda self, x: F.leaky_relu(x, 0.1) * x,
    "mish": lambda self, x: F.mish(x),
    "glu": lambda self, x: torch.cat([F.glu(x), x[..., :2]], dim=-1),
    "log sigmoid": lambda self, x: F.logsigmoid(x),
    "clamp": lambda self, x: x.clamp(-0.5, 0.5) * x,
    "powers": lambda self, x: x**3 + x.abs().sqrt() + torch.exp(-x.square()),
    "where": lambda self, x: torch.where(x > 0, x.sin(), x * x),
    "largest": lambda self, x: x.amax(-1, keepdim=True) * x + x.max(-1, keepdim=True)[0],
    "softmax": lambda self, x: x.softmax(-1),
    "log softmax": lambda self, x: x.log_softmax(1),
    "logsumexp": lambda self, x: x * x.logsumexp(1, keepdim=True),
    "layer norm": lambda self, x: self.norm(x),
    "group norm": lambda self, x: self.groups(x),
    "batch norm": lambda self, x: self.batch_norm(x),
    "rms norm": lambda self, x: F.rms_norm(x, (WIDTH,), self.weight[0]),
    "normalized": lambda self, x: F.normalize(x, dim=-1) + x.norm(dim=-1, keepdim=True),
    "products": lambda self, x: (x @ self.weight) @ x.transpose(1, 2) @ x,
    "einsum": lambda self, x: torch.einsum("blw,wv,bkv->blv", x, self.weight, x),
    "bilinear": lambda self, x: F.bilinear(x, x, self.weight.expand(WIDTH, WIDTH, WIDTH)),
    "convolution": lambda self, x: F.pad(self.convolved(x), (1, 1)) * x,
    "pooling": lambda self, x: F.avg_pool1d(x, 2).repeat_interleave(2, dim=-1) * x,
    "largest of windows": lambda self, x: F.max_pool1d(x, 3, stride=1, padding=1) * x,
    "attention": _attended,
    "messages": _neighbours,
    "gathered": lambda self, x: x.gather(1, x.argsort(1)) * x + self.table.weight,
    "written to parts": lambda self, x: torch.stack([x[..., 0], x[..., 3]], -1).repeat(1, 1, 2) * x,
    "sums along": lambda self, x: x.cumsum(1) * x.flip(1).roll(1, dims=2),
    "several results": _several_results,
    "in place": _in_place,
    "no dropout": lambda self, x: F.dropout(x, 0.5, training=False) * x,
    "wider": lambda self, x: x.float().double() * x,
    "interpolated": lambda self, x: F.interpolate(x, scale_factor=2, mode="linear")[..., ::2] * x,
    "compared": lambda self, x: x * F.smooth_l1_loss(x, x.detach() + 1, reduction="none"),
    "made apart": lambda self, x: torch.cat([y.square() for y in x.split(3, dim=1)], dim=1),
}


@pytest.fixture(autouse=True)
def _fp64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def batch(size: int) -> dict[str, Tensor]:
    torch.manual_seed(size)
    x, wanted = torch.randn(2, size, LENGTH, WIDTH)
    return {"x": x, "wanted": wanted}


def check_equal(module: nn.Module) -> None:
    graph = capture_module(module, batch(2), batch(3))
    params = dict(module.named_parameters())
    made = []
    for run in (lambda given: module(**given), lambda given: loss_of_graph(graph, module, given)):
        loss = run(batch(5))
        made.append((loss, torch.autograd.grad(loss, list(params.values()), allow_unused=True)))
    (expected, theirs), (found, mine) = made
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for name, own, other in zip(params, mine, theirs, strict=True):
        if other is None:
            assert own is None or not own.any(), name
        else:
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11, msg=name)


def build(*args: Any) -> Differentiated:
    torch.manual_seed(0)
    return Differentiated(*args)


@pytest.mark.parametrize("inner", INNER)
def test_forces_through_each_op(inner):
    check_equal(build(INNER[inner]))


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_of_a_gradient(loss):
    check_equal(build(INNER["tanh"], LOSSES[loss]))


def _written_in_part(self: Differentiated, x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = x[:, 1]
    return y


def _read_before_written(self: Differentiated, x: Tensor) -> Tensor:
    return (x * 2).mul_(x)


def _written_through_a_view(self: Differentiated, x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0].mul_(3)
    return y * y


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            lambda self, x: F.dropout(x, 0.5),
            r"through aten.dropout.default at .*draws random numbers inside.*rand_like",
        ),
        (
            lambda self, x: RoundedThrough.apply(x, 4),
            r"planner.autograd_function.default at .*a function of its own.*plain tensor",
        ),
        (_written_in_part, "and written in place since; write the out-of-place form"),
        (_read_before_written, "reads what was made at .* and written in place since"),
        (_written_through_a_view, "and written in place since; write the out-of-place form"),
    ],
)
def test_what_has_no_derivative_is_refused(inner, message):
    with pytest.raises(CaptureError, match=message) as caught:
        capture_module(build(inner), batch(2), batch(3))
    assert "test_inner_gradients.py" in str(caught.value), "the user's line"
    assert "\n" not in str(caught.value)


def _batched(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    x = x.requires_grad_()
    u = self.output(x).flatten()
    return grad(u, x, grad_outputs=torch.eye(len(u)), is_grads_batched=True).square().mean()


def _unused(self: Differentiated, x: Tensor, wanted: Tensor) -> Tensor:
    return grad(self.output(x).sum(), wanted.requires_grad_()).square().mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_batched, "is_grads_batched=True.*call it once for each"),
        (_unused, "allow_unused=True|not.*used in the graph"),
    ],
)
def test_what_autograd_is_asked_is_refused(loss, message):
    with pytest.raises(CaptureError, match=message):
        capture_module(build(INNER["tanh"], loss), batch(2), batch(3))

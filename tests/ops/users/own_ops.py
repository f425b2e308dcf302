"""A model file whose ops are its own, each with a rule; `RULE` and others are put in by tests."""

MODEL_FILE = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner


@torch.library.custom_op("{library}::project", mutates_args=())
def project(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x @ w + bias


@project.register_fake
def _(x, w, bias):
    return x.new_empty(*x.shape[:-1], w.shape[-1])


def _of_project(ctx, grad):
    x, w = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])
    return grad @ w.T, x.reshape(-1, x.shape[-1]).T @ rows, rows.sum(0)


project.register_autograd(
    _of_project, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)


@torch.library.custom_op("{library}::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
    return (scores @ v).transpose(1, 2).flatten(2).contiguous()


@attend.register_fake
def _(q, k, v, num_heads):
    return torch.empty_like(v)


def _of_attend(ctx, grad):
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        q, k, v = (t.unflatten(-1, (ctx.num_heads, -1)).transpose(1, 2) for t in given)
        out = (torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v).transpose(1, 2).flatten(2)
    return *torch.autograd.grad(out, given, grad), None


def _keep(ctx, inputs, output):
    *tensors, ctx.num_heads = inputs
    ctx.save_for_backward(*tensors)


attend.register_autograd(_of_attend, setup_context=_keep)
{rules}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.into = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(16) / 4) for _ in range(3))
        self.out = nn.Parameter(torch.randn(16, 16) / 4)
        self.bias = nn.Parameter(torch.randn(16) / 4)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (project(y, w, b) for w, b in zip(self.into, self.biases))
        return x + project(attend(q, k, v, 4), self.out, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def model():
    torch.manual_seed(0)
    return Net()


def batch(size):
    draw = torch.Generator().manual_seed(size)
    return {{name: torch.randn(size, 8, 16, generator=draw) for name in ("x", "target")}}
"""

PROJECT = 'planner.register_rule(project, "...d, df, +f -> ...f")'
ATTEND = (
    'planner.register_rule(attend, "bsh, bth, bth -> bsh", divided={"num_heads": "h"},'
    " flop=lambda q, k, v, num_heads: 4.0 * q.numel() * k.shape[1])"
)


def model_file(library: str, *rules: str) -> str:
    return MODEL_FILE.format(library=library, rules="\n".join(rules))

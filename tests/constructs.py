"""Constructs that people write into models, and what becomes of each: kept exactly, or refused.

The table of docs/constructs.md is made of these; `tests/capture/test_constructs.py` shows each.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.nn import utils
from torch.nn.attention import flex_attention as torchs_flex
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 4

Inner = Callable[["Chain", Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Construct:
    """A model with one construct in it; `refused` is what the message of its refusal matches.

    `group` and `what` name it in the docs; `note` says there how it is kept, or what to do.
    """

    group: str
    what: str
    build: Callable[[], nn.Module]
    refused: str = ""
    note: str = ""


class Chain(nn.Module):
    """Three layers with something done after each: `inner`, set up by `extra`."""

    def __init__(self, inner: Inner, extra: Callable[[Chain], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._run = inner
        extra(self)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self._run(self, torch.tanh(layer(x)), index)
        return F.mse_loss(x, target)


def batch(size: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, size, WIDTH, dtype=torch.float64)
    return x, target


CONSTRUCTS: list[Construct] = []


def _construct(
    group: str,
    what: str,
    *,
    inner: Inner = lambda self, x, index: x,
    extra: Callable[[Chain], object] = lambda self: None,
    refused: str = "",
    note: str = "",
) -> None:
    CONSTRUCTS.append(
        Construct(
            group=group,
            what=what,
            build=lambda: Chain(inner, extra),
            refused=refused,
            note=note,
        )
    )


# -- autograd functions -------------------------------------------------------------------


class RoundedThrough(torch.autograd.Function):
    """A straight-through estimator, with a number and a tensor of its own to its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 0.9), None


class Reversed(torch.autograd.Function):
    """A gradient reversal, in the style with setup_context."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class WeightedPick(torch.autograd.Function):
    """Two inputs that train, two results, one of them without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        picked = x.argmax(-1)
        ctx.mark_non_differentiable(picked)
        return x @ weight, picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), x.t() @ grad


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class WritesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class GivenModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        return x * module.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _closing_over(factor: float) -> type[torch.autograd.Function]:
    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * factor

    return Closed


_FUNCTIONS = "autograd functions"


def _weight(self: Chain) -> None:
    self.weight = nn.Parameter(torch.eye(WIDTH))


def _weighted_pick(self: Chain, x: Tensor, index: int) -> Tensor:
    made, picked = WeightedPick.apply(x, self.weight)
    return made + picked.unsqueeze(-1)


_construct(
    _FUNCTIONS,
    "`torch.autograd.Function`: straight-through estimator",
    inner=lambda self, x, index: RoundedThrough.apply(x, 4),
    note="an op that runs the function's own forward and backward, on whole tensors",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function`: gradient reversal, scaled gradient",
    inner=lambda self, x, index: Reversed.apply(x, 0.5),
    note="the same",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function` of parameters, of several results",
    extra=_weight,
    inner=_weighted_pick,
    note="the same",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function` that draws random numbers",
    inner=lambda self, x, index: Noisy.apply(x),
    refused=r"Noisy at .*constructs.py:\d+: .* draws random numbers",
    note="draw outside, pass the numbers",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function` that writes into its input (`mark_dirty`)",
    inner=lambda self, x, index: WritesInput.apply(x * 1),
    refused="WritesInput .* writes into its input",
    note="return a new tensor",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function` that is given modules, functions, containers of tensors",
    extra=lambda self: setattr(self, "factor", 2.0),
    inner=lambda self, x, index: GivenModule.apply(x, self),
    refused="GivenModule .* is given a Chain",
    note="pass tensors and numbers",
)
_construct(
    _FUNCTIONS,
    "`torch.autograd.Function` that reads variables of the function around it",
    inner=lambda self, x, index: _closing_over(0.1).apply(x),
    refused="Closed .* reads factor of the function around it",
    note="pass them as arguments",
)

# -- custom ops ---------------------------------------------------------------------------


@torch.library.custom_op("planner_tests::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    return x / (1 + x * x)


@squash.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _squash_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * (1 - x * x) / (1 + x * x) ** 2


squash.register_autograd(
    _squash_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

_construct(
    "custom ops",
    "`torch.library.custom_op` with its fake and its autograd function",
    inner=lambda self, x, index: squash(x),
    note="whole on tp and cp ranks; [a rule](sharding.md#an-op-of-your-own) lets them cut it",
)

# -- hooks --------------------------------------------------------------------------------

_HOOKS = "hooks"


def _hooked(self: Chain, x: Tensor, index: int) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def _saved_doubled(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t):
        return torch.sin(x)


def _halve_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


_construct(
    _HOOKS,
    "forward hook, forward pre-hook of a module",
    extra=lambda self: (
        self.layers[1].register_forward_hook(lambda module, args, out: 2 * out),
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] / 2,)),
    ),
    note="runs while the model is captured",
)
_construct(
    _HOOKS,
    "hook on a tensor's gradient (`y.register_hook`)",
    inner=_hooked,
    refused=r"sets a hook on a gradient at .*constructs.py:\d+: `x.register_hook",
    note="an autograd function, or param groups of the optimizer",
)
_construct(
    _HOOKS,
    "hook on a parameter's gradient (`p.register_hook`)",
    extra=lambda self: self.layers[1].weight.register_hook(lambda g: 0.1 * g),
    refused=r"parameter layers.1.weight has a hook on its gradient \(defined at .*constructs",
    note="the same",
)
_construct(
    _HOOKS,
    "`p.register_post_accumulate_grad_hook`",
    extra=lambda self: self.layers[1].weight.register_post_accumulate_grad_hook(_halve_gradient),
    refused="parameter layers.1.weight has a hook on its gradient",
    note="the same",
)
_construct(
    _HOOKS,
    "full backward hook, full backward pre-hook of a module",
    extra=lambda self: self.layers[1].register_full_backward_hook(
        lambda module, given, out: (2 * given[0],)
    ),
    refused=r"module layers.1 \(Linear\) has a hook on its gradient",
    note="the same",
)
_construct(
    _HOOKS,
    "`torch.autograd.graph.saved_tensors_hooks`",
    inner=_saved_doubled,
    refused=r"changes what autograd saves .* at .*constructs.py:\d+",
    note="what is kept is the plan's choice",
)
_construct(
    _HOOKS,
    "`y.retain_grad()`",
    inner=lambda self, x, index: x.retain_grad() or x,
    note="no number changes; `engine.intermediates` gives values",
)
_construct(
    _HOOKS,
    "state-dict hooks",
    extra=lambda self: self._register_state_dict_hook(
        lambda module, state, prefix, meta: state.update({"extra": torch.zeros(1)})
    ),
    note="training does not read them",
)

# -- gradient mode ------------------------------------------------------------------------

_MODE = "what gradients flow through"


def _partly_without(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        fixed = 2 * x
        with torch.enable_grad():
            nested = 3 * x
    return x + fixed * x + nested


def _made_without(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        fixed = RoundedThrough.apply(x, 8) + torch.cat([x]) + x.type_as(x.float())
        copied = torch.zeros_like(x)
        copied.copy_(x)
        viewed = x.view_as(x)
    return x + x * fixed + x * copied + x * viewed


def _returned_without(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        moved, cast, laid = x.to(x.device), x.to(x.dtype), x.contiguous()
        undropped, copied = F.dropout(x, 0.5, training=False), x.t().contiguous().t()
    return x + moved * cast * laid * undropped * copied


def _detached_in_place(self: Chain, x: Tensor, index: int) -> Tensor:
    return x.clone().detach_() * x


def _inner_gradient(create_graph: bool, of: Callable[[Tensor], Tensor] = lambda x: x**3) -> Inner:
    def inner(self: Chain, x: Tensor, index: int) -> Tensor:
        energy = of(x).sum()
        (grad,) = torch.autograd.grad(energy, x, create_graph=create_graph, retain_graph=True)
        return x + grad * x

    return inner


def _inner_backward(self: Chain, x: Tensor, index: int) -> Tensor:
    (x**3).sum().backward(retain_graph=True)
    return x


def _inferred(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.inference_mode():
        scale = float((x * 2).shape[-1])
    return x * scale


def _inferred_product(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.inference_mode():
        fixed = x * 2
    return x * fixed


def _frozen_on_the_way(self: Chain, x: Tensor, index: int) -> Tensor:
    self.layers[0].weight.requires_grad_(False)
    return x


def _unused(self: Chain) -> None:
    self.unused = nn.Linear(WIDTH, WIDTH)


_construct(
    _MODE,
    "`detach()`, `x.data`",
    inner=lambda self, x, index: x * x.detach() + x * x.data,
)
_construct(_MODE, "`detach_()`", inner=_detached_in_place)
_construct(_MODE, "`no_grad`, `enable_grad`, nested", inner=_partly_without)
_construct(
    _MODE,
    "autograd functions, `cat`, casts, `copy_` and views under `no_grad`",
    inner=_made_without,
)
_construct(
    _MODE,
    "what returns its input under `no_grad` (`contiguous`, `to`)",
    inner=_returned_without,
    note="its gradient flows on, as in torch",
)
_construct(_MODE, "`inference_mode` around what no gradient needs", inner=_inferred)
_construct(
    _MODE,
    "`inference_mode` around what a backward needs",
    inner=_inferred_product,
    refused="Inference tensors cannot be saved for backward",
    note="one process fails, too; use `no_grad`",
)
_construct(_MODE, "`torch.autograd.grad` in forward", inner=_inner_gradient(False))
_construct(
    _MODE,
    "`torch.autograd.grad(..., create_graph=True)` in forward",
    inner=_inner_gradient(True),
    note="gradient penalties, forces, second derivatives: as ops, each divided like any other",
)
_construct(
    _MODE,
    "the same through dropout",
    inner=_inner_gradient(True, of=lambda x: F.dropout(x**3, 0.1)),
    refused="through aten.dropout.default at .* draws random numbers inside; draw them by an op",
    note="a product with a mask that is drawn",
)
_construct(
    _MODE,
    "the same through a `torch.autograd.Function`",
    inner=_inner_gradient(True, of=lambda x: RoundedThrough.apply(x, 4)),
    refused=r"through planner.autograd_function.default at .* plain tensor operations",
    note="plain operations",
)
_construct(
    _MODE,
    "`backward()` in forward",
    inner=_inner_backward,
    refused=r"calls backward\(\) at .*constructs.py",
    note="return the loss",
)
_construct(
    _MODE,
    "`torch.func` transforms (`grad`)",
    inner=lambda self, x, index: x + torch.func.grad(lambda t: (t**3).sum())(x),
    refused=r"a transform of torch.func .* at .*constructs.py",
    note="plain operations, `torch.autograd.grad`",
)
_construct(
    _MODE,
    "`torch.func` transforms (`vmap`)",
    inner=lambda self, x, index: torch.func.vmap(lambda t: t * t.sum())(x),
    refused=r"a transform of torch.func .* at .*constructs.py",
    note="plain operations",
)
_construct(
    _MODE,
    "`torch.func.functional_call`",
    inner=lambda self, x, index: torch.func.functional_call(
        self.layers[index], {"weight": 2 * self.layers[index].weight}, (x,)
    ),
)
_construct(
    _MODE,
    "frozen parameter",
    extra=lambda self: self.layers[0].weight.requires_grad_(False),
    note="no gradient, optimizer state or exchange; so adapters (`peft` LoRA)",
)
_construct(
    _MODE,
    "parameter frozen by the forward",
    inner=_frozen_on_the_way,
    refused="sets requires_grad of layers.0.weight to False",
    note="freeze before training",
)
_construct(_MODE, "parameter that the forward does not use", extra=_unused)
_construct(
    _MODE,
    "parameter that no gradient reaches",
    extra=_unused,
    inner=lambda self, x, index: x + self.unused(x).detach(),
    note="left out of the optimizer, as where `grad` is None",
)
_construct(
    _MODE,
    "buffer with a gradient",
    extra=lambda self: self.register_buffer("scale", torch.ones(WIDTH, requires_grad=True)),
    inner=lambda self, x, index: x * self.scale,
    note="not trained; an optimizer over it is refused",
)

# -- state --------------------------------------------------------------------------------

_STATE = "state of the module"
_calls = {"number": 0}


def _counted(self: Chain, x: Tensor, index: int) -> Tensor:
    self.steps += 1
    return x * (2 if self.steps > 1000 else 1)


def _counted_inside(self: Chain, x: Tensor, index: int) -> Tensor:
    self.state["steps"][0] += 1
    return x


def _counted_outside(self: Chain, x: Tensor, index: int) -> Tensor:
    _calls["number"] += 1
    return x * _calls["number"]


def _recurrent(self: Chain, x: Tensor, index: int) -> Tensor:
    before, self.kept = self.kept, x.detach()
    return x if before is None else x + before.mean()


def _cached(self: Chain, x: Tensor, index: int) -> Tensor:
    if self.table is None:
        self.table = torch.arange(WIDTH, dtype=x.dtype, device=x.device) / WIDTH
    return x + self.table


def _cached_batch(self: Chain, x: Tensor, index: int) -> Tensor:
    if self.table is None:
        self.table = x.detach().mean()
    return x + self.table


def _stored(self: Chain, x: Tensor, index: int) -> Tensor:
    self.latest = x
    return x


def _toggled(self: Chain, x: Tensor, index: int) -> Tensor:
    self.eval()
    x = F.dropout(x, 0.5, self.training)
    self.train()
    return x


def _left_in_eval(self: Chain, x: Tensor, index: int) -> Tensor:
    self.eval()
    return x


class Halves(nn.Module):
    """A layer in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)) / 2


class Whole(Halves):
    """The same in another way, and with another part."""

    def __init__(self, other: Halves) -> None:
        nn.Module.__init__(self)
        self.layer, self.act = other.layer, nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class BySize(nn.Module):
    """Chooses between them by the size of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Halves()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] < 100 and type(self.part) is Halves:
            self.part = Whole(self.part)
        return self.part(x)


def _seeded(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return x + torch.rand_like(x)


_construct(
    _STATE,
    "Python number that the forward changes (`self.n += 1`)",
    extra=lambda self: setattr(self, "steps", 0),
    inner=_counted,
    refused=r"changes steps \(3, then 6\)",
    note="a buffer, or a part of the batch",
)
_construct(
    _STATE,
    "the same inside a container or an object",
    extra=lambda self: setattr(self, "state", {"steps": [0]}),
    inner=_counted_inside,
    refused=r"changes state.steps.0 \(3, then 6\)",
    note="the same",
)
_construct(
    _STATE,
    "a global that the forward changes and computes with",
    inner=_counted_outside,
    refused="second forward computes something else than the first",
    note="the same",
)
_construct(
    _STATE,
    "tensor kept from one forward for the next",
    extra=lambda self: setattr(self, "kept", None),
    inner=_recurrent,
    refused="changes kept",
    note="a buffer",
)
_construct(
    _STATE,
    "tensor cached by the first forward",
    extra=lambda self: setattr(self, "table", None),
    inner=_cached,
)
_construct(
    _STATE,
    "the same, made of the first batch's values",
    extra=lambda self: setattr(self, "table", None),
    inner=_cached_batch,
    refused="changes table",
    note="compute it from each batch, or before training",
)
_construct(_STATE, "result stored in an attribute (`self.last = x`)", inner=_stored)
_construct(
    _STATE,
    "`random`, `numpy.random` in forward",
    inner=lambda self, x, index: x * random.random(),
    refused="draws random numbers from Python or NumPy",
    note="`torch.rand`",
)
_construct(
    _STATE,
    "the same, where the number decides nothing (`random.random() < 0`)",
    inner=lambda self, x, index: x * 2 if random.uniform(0, 1) < 0.0 else x,
)
_construct(
    _STATE,
    "`torch.manual_seed`, `set_rng_state`, `fork_rng` in forward",
    inner=_seeded,
    refused=r"forward sets the random state \(manual_seed at .*`torch.manual_seed\(1\)`",
    note="numbers in a buffer, or passed with the batch",
)
_construct(_STATE, "`train()` and `eval()` in forward, put back", inner=_toggled)
_construct(
    _STATE,
    "`eval()` in forward, left so",
    inner=_left_in_eval,
    refused="sets training of .* to False",
    note="set it before training",
)
_construct(
    _STATE,
    "a part put in another's place by the first forward, with its weights (BigBird)",
    extra=lambda self: self.layers.__setitem__(1, BySize()),
    note="the part that it puts there",
)

# -- writes -------------------------------------------------------------------------------

_WRITES = "writes in place"


def _reshaped_and_read(self: Chain, x: Tensor, index: int) -> Tensor:
    x = x * 2
    x.view(-1).mul_(0.5)
    return x


def _mean_buffers(self: Chain) -> None:
    for layer in self.layers:
        layer.register_buffer("mean", torch.zeros(2, WIDTH))


def _averaged(self: Chain, x: Tensor, index: int) -> Tensor:
    mean = self.layers[index].mean
    with torch.no_grad():
        mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x - mean[0]


def _averaged_by_copy(self: Chain, x: Tensor, index: int) -> Tensor:
    mean = self.layers[index].mean
    mean.copy_(0.9 * mean + 0.1 * x.detach().mean(0))
    return x - mean[0]


def _averaged_by_assignment(self: Chain, x: Tensor, index: int) -> Tensor:
    layer = self.layers[index]
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return x - layer.mean[0]


def _averaged_in_part(self: Chain, x: Tensor, index: int) -> Tensor:
    mean = self.layers[index].mean
    mean[1] = 0.5 * mean[0] + 0.5 * x.detach().mean(0)
    return x - mean.sum(0)


def _averaged_with_gradient(self: Chain, x: Tensor, index: int) -> Tensor:
    mean = self.layers[index].mean
    mean.add_(x.mean(0))
    return x - mean.detach()[0]


def _averaged_elsewhere(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        self.layers[0].mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x - self.layers[0].mean[0]


def _counters(self: Chain) -> None:
    for layer in self.layers:
        layer.register_buffer("count", torch.zeros(()))


def _counted_in_buffer(self: Chain, x: Tensor, index: int) -> Tensor:
    self.layers[index].count += 1
    return x * (1 + 0.1 * self.layers[index].count)


def _written(self: Chain, x: Tensor, index: int) -> Tensor:
    y = x * 2
    y += 1
    y[:, 0] = 0
    return y


def _written_complex(self: Chain, x: Tensor, index: int) -> Tensor:
    z = torch.fft.rfft(x)
    z[:, :2] = z[:, :2] * (1 + 2j)
    z[:, 2] = z[:, 0].conj()
    return torch.fft.irfft(z, n=x.shape[-1])


def _written_through_a_view(self: Chain, x: Tensor, index: int) -> Tensor:
    y = x * 2
    y.view(-1).mul_(2)
    return y


def _written_without_gradient(self: Chain, x: Tensor, index: int) -> Tensor:
    y = x * 1
    with torch.no_grad():
        y.mul_(2)
    return y


def _written_out(self: Chain, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)
    return x + out


def _clamped_weight(self: Chain, x: Tensor, index: int) -> Tensor:
    self.layers[index].weight.data.clamp_(-0.2, 0.2)
    return x


_construct(
    _WRITES,
    "moving average in a buffer (`self.m.mul_(0.9).add_(...)`)",
    extra=_mean_buffers,
    inner=_averaged,
    note="each replica and microbatch moves it on its own, once that is accepted "
    "(`--accept local-buffers`)",
)
_construct(_WRITES, "the same by `copy_`", extra=_mean_buffers, inner=_averaged_by_copy)
_construct(_WRITES, "the same by assignment", extra=_mean_buffers, inner=_averaged_by_assignment)
_construct(_WRITES, "the same through an index", extra=_mean_buffers, inner=_averaged_in_part)
_construct(
    _WRITES,
    "through a reshape, whose source is read no more (`flatten(1)`, then `relu_()`)",
    inner=lambda self, x, index: x.view(-1, 2, WIDTH // 2).transpose(1, 2).flatten(1).relu_(),
)
_construct(
    _WRITES,
    "the same, and its source is read",
    inner=_reshaped_and_read,
    refused=r"reads a view at .*constructs.py:\d+",
    note="take the view again after the write",
)
_construct(
    _WRITES,
    "value with a gradient written into a buffer",
    extra=_mean_buffers,
    inner=_averaged_with_gradient,
    refused="a value that has a gradient into buffer layers.0.mean",
    note="`detach()` it",
)
_construct(
    _WRITES,
    "buffer written in one block and used in another",
    extra=_mean_buffers,
    inner=_averaged_elsewhere,
    refused="buffer layers.0.mean is written in block layers.2 and used in block layers.0",
    note="a buffer for each block",
)
_construct(
    _WRITES,
    "`BatchNorm(momentum=None)`: a mean over all steps",
    extra=lambda self: setattr(self, "norm", nn.BatchNorm1d(WIDTH, momentum=None)),
    inner=lambda self, x, index: self.norm(x) if index == 1 else x,
    note="steps are those of its own count, on each rank",
)
_construct(
    _WRITES,
    "counter in a buffer",
    extra=_counters,
    inner=_counted_in_buffer,
    note="moves once a step, as all that follows from buffers and parameters alone",
)
_construct(_WRITES, "activation written in place, by index", inner=_written)
_construct(_WRITES, "the same in a complex activation (`z[:, :2] = y`)", inner=_written_complex)
_construct(
    _WRITES,
    "the same through another view",
    inner=_written_through_a_view,
    refused=r"reads a view at .*constructs.py.* after either was written in place",
    note="the out-of-place form",
)
_construct(
    _WRITES,
    "activation with a gradient written under `no_grad`",
    inner=_written_without_gradient,
    refused=r"in place at .*constructs.py:\d+: `y.mul_\(2\)` without gradient",
    note="the out-of-place form",
)
_construct(_WRITES, "`out=`", inner=_written_out)
_construct(
    _WRITES,
    "parameter written by the forward (`weight.data.clamp_`)",
    inner=_clamped_weight,
    refused=r"in place into parameter layers.0.weight at .*constructs.py",
    note="compute with a clamped copy",
)

# -- parameters ---------------------------------------------------------------------------

_PARAMETERS = "parameters"


def _share_data(self: Chain) -> None:
    self.layers[2].weight.data = self.layers[0].weight.data


def _share_view(self: Chain) -> None:
    self.layers[2].weight = nn.Parameter(self.layers[0].weight.data.t())


def _tie(self: Chain) -> None:
    self.layers[2].weight = self.layers[0].weight


_construct(_PARAMETERS, "tied (`b.weight = a.weight`)", extra=_tie)
_construct(
    _PARAMETERS,
    "shared by `.data`",
    extra=_share_data,
    refused="layers.0.weight and layers.2.weight are two tensors in the same memory",
    note="tie them",
)
_construct(
    _PARAMETERS,
    "shared by a view",
    extra=_share_view,
    refused="layers.0.weight and layers.2.weight are two tensors in the same memory",
    note="tie them",
)
_construct(
    _PARAMETERS,
    "without elements (no prefix tokens, no inputs)",
    extra=lambda self: setattr(self, "prefix", nn.Parameter(torch.zeros(0, WIDTH))),
    inner=lambda self, x, index: torch.cat([self.prefix, x]),
)
_construct(
    _PARAMETERS,
    "complex",
    extra=lambda self: setattr(self, "modes", nn.Parameter(torch.ones(WIDTH // 2 + 1) + 0j)),
    inner=lambda self, x, index: torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=x.shape[-1]),
    note="not under ZeRO, which refuses it",
)
_construct(
    _PARAMETERS,
    "`parametrizations.weight_norm`, `orthogonal`",
    extra=lambda self: (
        parametrizations.weight_norm(self.layers[1]) and parametrizations.orthogonal(self.layers[2])
    ),
)
_construct(
    _PARAMETERS,
    "`parametrizations.spectral_norm`",
    extra=lambda self: parametrizations.spectral_norm(self.layers[1]),
    note="its power iteration moves once a step, as in one process",
)
_construct(
    _PARAMETERS,
    "`utils.spectral_norm`",
    extra=lambda self: utils.spectral_norm(self.layers[1]),
    note="the same",
)
_construct(
    _PARAMETERS,
    "`prune`",
    extra=lambda self: prune.l1_unstructured(self.layers[1], "weight", 0.5),
)
_construct(
    _PARAMETERS,
    "sparse, nested or quantized tensor in a buffer or an attribute",
    extra=lambda self: self.register_buffer("road", torch.eye(WIDTH).to_sparse()),
    inner=lambda self, x, index: torch.sparse.mm(self.road, x.t()).t(),
    refused=r"buffer road is a sparse_coo tensor of shape \[4, 4\], which no graph holds; keep it",
    note="dense, or its indices and values as buffers",
)
_construct(
    _PARAMETERS,
    "sparse tensor made by the forward",
    inner=lambda self, x, index: torch.sparse.mm(torch.eye(WIDTH).to_sparse(), x.t()).t(),
    refused=r"at .*constructs.py:\d+: .* computes with a sparse tensor, .* multiply by the dense",
    note="the same",
)
_construct(
    _PARAMETERS,
    "lazy modules, before their first batch",
    extra=lambda self: setattr(self, "lazy", nn.LazyLinear(WIDTH)),
    inner=lambda self, x, index: self.lazy(x),
    refused="parameter lazy.weight has no shape yet",
    note="give the sizes",
)


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Let torch's flex_attention train on a CPU, by its formula and without a compiler."""
    given = torchs_flex._validate_device
    torchs_flex._validate_device = lambda *tensors: None
    torchs_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torchs_flex._validate_device = given
        torchs_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def _attends_flexibly(self: Chain, x: Tensor, index: int) -> Tensor:
    each = x[:, None, :, None]
    mask = torchs_flex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, WIDTH, WIDTH, device=x.device
    )
    with flex_on_cpu():
        near = torchs_flex.flex_attention(
            each, each, each, score_mod=lambda score, b, h, q, k: score - 0.3 * (q - k).abs()
        )
        return torchs_flex.flex_attention(each, near, each, block_mask=mask)[:, 0, :, 0]


_sine = torch.compile(lambda x: torch.sin(x) * x, backend="eager")

# -- values that decide -------------------------------------------------------------------

_VALUES = "what depends on values"


class Picks(nn.Module):
    """Rows that a condition picks; with `leave` they leave the module, however many they are."""

    def __init__(self, leave: bool = False) -> None:
        super().__init__()
        self.layer, self.leave = nn.Linear(WIDTH, WIDTH), leave

    def forward(self, x: Tensor) -> Tensor:
        picked = x[:, 0] > 0
        if self.leave:
            return x[picked]
        made = x.clone()
        made[picked] = self.layer(x[picked])
        return made


class PutsBack(nn.Module):
    """Around a module whose result's shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks(leave=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros_like(x).masked_scatter(x[:, :1] > 0, self.picks(x) / 2)


class Experts(nn.Module):
    """A loop over those that were chosen, `inner` done with each one's rows."""

    def __init__(self, inner: Inner = lambda self, x, index: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._inner = inner
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :3].argmax(-1)
        made = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            rows = (chosen == index).nonzero().flatten()
            if rows.numel():
                made = made.index_add(0, rows, self._inner(self, layer(x[rows]), index))
        return made


class Packed(nn.Module):
    """Recurrent layers over samples of their own lengths, padded to all, or to the longest."""

    def __init__(self, total_length: int | None) -> None:
        super().__init__()
        kinds = (nn.LSTM, nn.GRU, nn.RNN)
        self.layers = nn.ModuleList(kind(1, 2, batch_first=True) for kind in kinds)
        self.total_length = total_length

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:] > 0).sum(-1).cpu()
        packed = pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False)
        every = [
            pad_packed_sequence(layer(packed)[0], True, total_length=self.total_length)[0]
            for layer in self.layers
        ]
        return torch.stack(every).sum((0, -1))


class Rounds(nn.Module):
    """As many rounds as the batch says, none at times; the result's shape is one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for _ in range(int(steps.max())):
            made = torch.tanh(self.layer(made) + x)
        return made


class Counted:
    """No tensor, and no number."""


class GivenObject(Experts):
    def forward(self, x: Tensor, given: Counted) -> Tensor:
        return super().forward(x)


def _checked(self: Chain, x: Tensor, index: int) -> Tensor:
    if (index >= 0 and not (bool((x < 9).all()) and x.min() > -9)) or x.sum() > 1e9:
        text = f"layer {index}"
        raise ValueError(text)
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    assert torch.all(x > -9).item(), "too small"
    assert x.max().item() <= 9
    return 2 * x


def _checked_and_caught(self: Chain, x: Tensor, index: int) -> Tensor:
    try:
        if x.max() > 9:
            raise ValueError("too large")
    except ValueError:
        return x / 9
    return x


def _attends_alone(x: Tensor) -> Tensor:
    each = x[:, None, None]
    return F.scaled_dot_product_attention(each, each, 2 * each)[:, 0, 0]


def _picks_in_a_function(x: Tensor, scale: float = 1.0) -> Tensor:
    picked = x[:, 0] > 0
    made = x.clone()
    made[picked] = scale * torch.tanh(x[picked])
    return made


def _part(make: Callable[[], nn.Module]) -> Callable[[Chain], None]:
    return lambda self: setattr(self, "part", make())


def _through_part(self: Chain, x: Tensor, index: int) -> Tensor:
    return x + self.part(x) if index == 1 else x


def _kept_result(self: Any, x: Tensor, index: int) -> Tensor:
    self.latest = x
    return x


def _counts_in_buffer(self: Any, x: Tensor, index: int) -> Tensor:
    self.count += 1
    return x


def _counts_in_python(self: Any, x: Tensor, index: int) -> Tensor:
    self.number = getattr(self, "number", 0) + 1
    return x


def _doubling_hook(make: Callable[[], nn.Module]) -> nn.Module:
    part = make()
    part.register_forward_hook(lambda module, args, made: 2 * made)
    return part


_construct(
    _VALUES,
    "a loop over chosen experts, in a module of its own",
    extra=_part(Experts),
    inner=_through_part,
    note="rows in the order of their experts, where [recognised](sharding.md#rows-of-experts); "
    "else the smallest module that depends on values runs as it is, whole on every rank",
)
_construct(
    _VALUES,
    "boolean indexing, `.item()`, `nonzero()`, `if` of a value, in a module of its own",
    extra=_part(Picks),
    inner=_through_part,
    note="the same",
)
_construct(
    _VALUES,
    "a result whose shape depends on values, used up in the module around",
    extra=_part(PutsBack),
    inner=_through_part,
    note="the module around runs as it is",
)
_construct(
    _VALUES,
    "a loop of `int(steps.max())` rounds, in a module of its own",
    extra=_part(Rounds),
    inner=lambda self, x, index: x + self.part(x, (x > 0).sum(-1)) if index == 1 else x,
    note="the module runs as it is",
)
_construct(
    _VALUES,
    "inside it: `nn.LSTM`, `nn.GRU`, `nn.RNN` over packed sequences, with `total_length`",
    extra=_part(lambda: Packed(WIDTH)),
    inner=_through_part,
    note="runs as in one process",
)
_construct(
    _VALUES,
    "the same, as long as the longest sample that a part of the batch has",
    extra=_part(lambda: Packed(None)),
    inner=lambda self, x, index: x + self.part(x).mean(-1, keepdim=True),
    refused="Packed at .* pad_packed_sequence makes it as long as .* give it total_length",
    note="`pad_packed_sequence(..., total_length=)`",
)
_construct(
    _VALUES,
    "inside it: `torch.autograd.Function`",
    extra=_part(lambda: Experts(lambda self, x, index: RoundedThrough.apply(x, 4))),
    inner=_through_part,
    note="runs as in one process",
)
_construct(
    _VALUES,
    "inside it: `torch.utils.checkpoint`",
    extra=_part(
        lambda: Experts(lambda self, x, index: checkpoint(torch.sin, x, use_reentrant=False))
    ),
    inner=_through_part,
    note="the same",
)
_construct(
    _VALUES,
    "inside it: `torch.compile`",
    extra=_part(lambda: Experts(lambda self, x, index: _sine(x))),
    inner=_through_part,
    note="the same",
)
_construct(
    _VALUES,
    "inside it: attention without dropout",
    extra=_part(lambda: Experts(lambda self, x, index: _attends_alone(x))),
    inner=_through_part,
    note="the same",
)
_construct(
    _VALUES,
    "forward hook on it, and inside it",
    extra=_part(lambda: _doubling_hook(lambda: Experts(lambda self, x, index: 2 * x))),
    inner=_through_part,
    note="an op after the module",
)
_construct(
    _VALUES,
    "`if` of a value that only raises, `assert` of a value",
    inner=_checked,
    note="without the check, as where nothing is raised",
)
_construct(
    _VALUES,
    "the same, where the exception is caught",
    inner=_checked_and_caught,
    refused=r"constructs.py:\d+: `if x.max\(\) > 9:`.*depends on a tensor's values",
    note="put it into a module of its own",
)
_construct(
    _VALUES,
    "in a function that the model's own forward calls with tensors and numbers",
    inner=lambda self, x, index: _picks_in_a_function(x, scale=0.5),
    note="the function runs as it is, in the same way",
)
_construct(
    _VALUES,
    "in the model's own forward, or in the loss",
    inner=lambda self, x, index: 2 * x if x.mean() > 0 else x,
    refused=r"constructs.py:\d+: .*depends on a tensor's values.*module of its own",
    note="put it into a module of its own",
)
_construct(
    _VALUES,
    "a result whose shape depends on values, used in the model's own forward",
    extra=_part(lambda: Picks(leave=True)),
    inner=lambda self, x, index: self.part(x).mean(0) + x,
    refused="Picks at .* returns a tensor whose shape, or a number, depends on values",
    note="a module around all that uses it",
)
_construct(
    _VALUES,
    "inside it: random draws (dropout, layers skipped by a draw)",
    extra=_part(lambda: Experts(lambda self, x, index: x if torch.rand(()) < 1 else 2 * x)),
    inner=_through_part,
    note="from a seed that is drawn outside",
)
_construct(
    _VALUES,
    "inside it: a buffer written",
    extra=_part(lambda: Experts(_counts_in_buffer)),
    inner=_through_part,
    refused="Experts .* writes into an input, a parameter or a buffer",
    note="return what is to be written",
)
_construct(
    _VALUES,
    "inside it: a result stored in an attribute",
    extra=_part(lambda: Experts(_kept_result)),
    inner=_through_part,
    refused="Experts .* stores a tensor in latest, which is not registered; return it",
    note="return it",
)
_construct(
    _VALUES,
    "inside it: a Python number that changes",
    extra=_part(lambda: Experts(_counts_in_python)),
    inner=_through_part,
    refused="Experts .* changes number",
    note="the same",
)
_construct(
    _VALUES,
    "it is given an object that is no tensor, number or list of them",
    extra=_part(GivenObject),
    inner=lambda self, x, index: x + self.part(x, Counted()),
    refused="GivenObject .* is given a Counted",
    note="pass tensors and numbers",
)

# -- compilers and precision --------------------------------------------------------------

_OTHER = "compilers, checkpointing, precision"


def _unlike_where_compiled(self: Chain, x: Tensor, index: int) -> Tensor:
    mask = None if torch.compiler.is_compiling() else torch.ones(WIDTH)
    return x * mask[None]


def _other_where_compiled(self: Chain, x: Tensor, index: int) -> Tensor:
    is_traced = isinstance(x, torch._subclasses.FakeTensor)  # as libraries test it, too
    x = x if torch.compiler.is_compiling() else 2 * x
    return x if is_traced else 3 * x


def _looks_where_not_compiled(self: Chain, x: Tensor, index: int) -> Tensor:
    x = x if torch.compiler.is_compiling() else 2 * x
    seen = x.abs() < 9
    if not torch.compiler.is_compiling() and seen.all():
        return x
    return torch.where(seen, x, 0)


def _looks_at_positions(self: Chain, x: Tensor, index: int) -> Tensor:
    places = torch.arange(WIDTH) + 1
    is_packed = (places.diff(prepend=places[:1] - 1) != 1).any()
    return x * 0 if is_packed else x * torch.ones(len(x), 1).mean(0)


def _autocast(enabled: bool) -> Inner:
    def inner(self: Chain, x: Tensor, index: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return self.layers[index](x)

    return inner


class Reentrant(nn.Module):
    """A layer under a reentrant checkpoint, also where its input needs no gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():  # torch says that gradients will be None
            warnings.simplefilter("ignore", UserWarning)
            return checkpoint(self.layer, x, use_reentrant=True)


def _compile_layer(self: Chain) -> None:
    self.layers[1] = torch.compile(self.layers[1], backend="eager")


_construct(
    _OTHER,
    "a branch of `torch.compiler.is_compiling()` that fails",
    inner=_unlike_where_compiled,
    note="the other branch, as in training",
)
_construct(
    _OTHER,
    "a branch of `torch.compiler.is_compiling()` that computes something else",
    inner=_other_where_compiled,
    note="the same",
)
_construct(
    _OTHER,
    "a branch without a compiler that looks at values (`mask.all()`)",
    inner=_looks_where_not_compiled,
    note="that test alone is answered as for a compiler",
)
_construct(
    _OTHER,
    "a condition on what the forward makes of sizes alone (`torch.arange(n)`, `torch.ones(b, n)`)",
    inner=_looks_at_positions,
    note="the branch that its values say",
)
_construct(
    _OTHER,
    "`torch.compile` of a submodule, of a function",
    extra=_compile_layer,
    inner=lambda self, x, index: _sine(x),
    note="captured through; blocks are compiled as a whole",
)
_construct(
    _OTHER,
    "`module.compile()`",
    extra=lambda self: self.layers[1].compile(backend="eager"),
    note="the same",
)
_construct(
    _OTHER,
    "`flex_attention`, `create_block_mask`",
    inner=_attends_flexibly,
    note="masks that compare positions are told, others and a `score_mod` written out",
)
_construct(
    _OTHER,
    "`torch.utils.checkpoint`, reentrant or not",
    inner=lambda self, x, index: checkpoint(torch.sin, x, use_reentrant=index == 1),
    note="captured through; recomputation is the plan's choice",
)
_construct(
    _OTHER,
    "the same around a layer of the model",
    inner=lambda self, x, index: checkpoint(self.more[index], x, use_reentrant=index != 1),
    extra=lambda self: setattr(self, "more", nn.ModuleList(nn.Linear(4, 4) for _ in range(3))),
    note="the same",
)
_construct(
    _OTHER,
    "the same, reentrant, of what has no gradient (the batch)",
    extra=lambda self: self.layers.__setitem__(0, Reentrant(self.layers[0])),
    note="the layer inside is not trained, as in torch",
)
_construct(
    _OTHER,
    "a function of `torch.utils.checkpoint` around a layer of the model (`checkpoint_wrapper`)",
    extra=lambda self: self.layers.__setitem__(1, checkpoint_wrapper(self.layers[1])),
    note="the same",
)
_construct(
    _OTHER,
    "`autocast`",
    inner=_autocast(True),
    refused="leave autocast out: precision is the plan's choice",
    note="`--precision bf16`",
)
_construct(_OTHER, "`autocast(enabled=False)`", inner=_autocast(False))

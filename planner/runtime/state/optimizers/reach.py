"""How far the update of an element reaches: what else of the model an optimizer reads for it.

    reach       the update of an element reads         for example
    "element"   its own gradients and state            SGD, Adam, Adagrad
    "tensor"    others of its parameter                Muon, Adafactor, Shampoo, LAMB
    "model"     other parameters, or its place among   Prodigy, a clip inside the optimizer
                them

A rank may hold a piece of a parameter, or of the model. An "element" optimizer does the same on
pieces; for a "tensor" one parameters are made whole (`whole_params`); a "model" one is right only
where a rank holds all. No optimizer is named here: the property is measured, on small random
tensors and a copy of the optimizer with its own settings, for each param group.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from planner.errors import ModelError

Reach = Literal["element", "tensor", "model"]

_TRIALS = (((8, 8), 25), ((136, 132), 2), ((24,), 2), ((6, 4, 3, 3), 2))
"""Shapes, with how many steps. Some preconditioners begin after tens of steps; others treat a
matrix whole from a size of 128 on, or filters in another way than matrices.
"""
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of how an update is computed, not which it is: the plainest way takes any dtype."""
_BESIDE = 1e4
"""How much larger the other parameter's gradients are: a limit on a norm (a clip, a step that is
left out) holds for one of the two cases, whatever it is.
"""
_DECADES = 6
"""Gradients of the trial beside another parameter are from 10**-6 to 10**6 times as large."""
_LR = 0.05
"""A schedule may begin at 0, where all optimizers agree."""
_ROUNDING = 1e-9

Update = list[Tensor]


class _TrialError(Exception):
    """The optimizer did not step on the trial's tensors."""


class _Exchanged(TorchDispatchMode):
    """Refuses messages to other ranks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise ModelError(
                f"{self._name} exchanges tensors with other ranks in its step, and the engine has "
                "done so before; give the optimizer's form for a single device, such as "
                "torch.optim.Muon"
            )
        return func(*args, **(kwargs or {}))


def reaches(optimizer: torch.optim.Optimizer) -> tuple[Reach | None, ...]:
    """Return the reach of each param group; None where the optimizer does not step in a trial.

    Its state and the script's random numbers stay. Raises ModelError for an optimizer that
    exchanges tensors with other ranks, or draws random numbers: replicas would drift apart.
    """
    known: list[tuple[dict[str, Any], Reach | None]] = []
    found = []
    # (A dry run's tensors have no values to compare.)
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
        for at, group in enumerate(optimizer.param_groups):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
            for others, reach in known:
                if _are_equal(settings, others):
                    found.append(reach)
                    break
            else:
                found.append(_reach(optimizer, at))
                known.append((settings, found[-1]))
    return tuple(found)


def _are_equal(left: Any, other: Any) -> bool:
    try:
        return bool(left == other)
    except Exception:  # of tensors
        return False


def takes(optimizer: torch.optim.Optimizer, at: int, *, rows: bool) -> bool:
    """Whether a param group steps on gradients that are sparse tensors of `rows`, or on dense ones.

    Its state and the script's random numbers stay. Raises ModelError where it exchanges tensors.
    """
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
        first = torch.ones(2, 8, 8, dtype=torch.float64)
        try:
            with _Exchanged(type(optimizer).__name__):
                _trained(optimizer, at, [first], rows=rows)
        except _TrialError:
            return False
    return True


def _reach(optimizer: torch.optim.Optimizer, at: int) -> Reach | None:
    reach: Reach | None = None
    rows = not takes(optimizer, at, rows=False)
    train = partial(_trained, rows=rows)
    for shape, steps in _TRIALS:
        generator = torch.Generator().manual_seed(0)
        # A value and a gradient for each step, of two parameters.
        first, second = torch.randn(2, 1 + steps, *shape, dtype=torch.float64, generator=generator)
        try:
            with _Exchanged(type(optimizer).__name__):
                whole = train(optimizer, at, [first])
        except _TrialError:
            continue
        # Opposite corners: what each reads of the others is not the same.
        corners = [_quarters(tensor)[::3] for tensor in (first, whole[0][None])]
        try:
            # Behind the other one: an update may go by a parameter's place in its group.
            beside = train(optimizer, at, [second, first], seed=1)[1:]
            apart = [train(optimizer, at, [corner])[0][None] for corner in corners[0]]
        except _TrialError:
            return "tensor"
        # The other parameter changed the update: by its gradients, or by its place ahead.
        if not _agree(whole, beside):
            if not _agree(whole, train(optimizer, at, [first], seed=1)):
                raise ModelError(
                    f"{type(optimizer).__name__} draws random numbers in its step, which differ by "
                    "rank: replicas would drift apart; use an optimizer that draws none"
                )
            return "model"
        if not _agree(*_far_apart(train, optimizer, at, first, second)):
            return "model"
        # A quarter that is stepped on alone moves otherwise than inside the whole.
        if not _agree(corners[1], apart):
            return "tensor"
        reach = "element"
    return reach


def _far_apart(
    train: Callable[..., Update],
    optimizer: torch.optim.Optimizer,
    at: int,
    first: Tensor,
    second: Tensor,
) -> tuple[Update, Update]:
    """Updates of a parameter alone and behind another, with gradients of many sizes."""
    steps = len(first) - 1
    sizes = 10.0 ** torch.linspace(-_DECADES, _DECADES, steps).roll(steps // 2).double()
    scale = torch.cat([torch.ones(1), sizes]).view(-1, *[1] * (first.dim() - 1))
    larger = torch.cat([second[:1], second[1:] * scale[1:] * _BESIDE])
    try:
        alone = train(optimizer, at, [first * scale])
        return alone, train(optimizer, at, [larger, first * scale])[1:]
    except _TrialError:  # of such sizes it can't be said
        return [], []


def _agree(ones: Update, others: Update) -> bool:
    def is_close(left: Tensor, other: Tensor) -> bool:
        atol = _ROUNDING * _LR
        return torch.allclose(left, other, rtol=_ROUNDING, atol=atol, equal_nan=True)

    return all(is_close(left, other) for left, other in zip(ones, others, strict=True))


def _quarters(tensor: Tensor) -> Update:
    """Cut the dims after the first into quarters, or a single one of them."""
    halves = tensor.chunk(2, 1)
    if tensor.dim() == 2:
        return [part for half in halves for part in half.chunk(2, 1)]
    return [part for half in halves for part in half.chunk(2, 2)]


def _trained(
    optimizer: torch.optim.Optimizer,
    at: int,
    given: Sequence[Tensor],
    *,
    seed: int = 0,
    rows: bool = False,
) -> Update:
    """Return how far parameters move with a copy of the optimizer.

    `given` has for each parameter its value, then its gradients, along dim 0; as `rows` it is
    given them as sparse tensors.
    """
    params = [nn.Parameter(each[0].clone()) for each in given]
    # By name: torch.manual_seed would seed devices, too, whose random numbers are not put back.
    torch.default_generator.manual_seed(seed)
    try:
        probe = _copy(optimizer, at, params)
        for step in range(1, len(given[0])):
            for param, each in zip(params, given, strict=True):
                param.grad = each[step].to_sparse(1) if rows else each[step].clone()
            type(probe).step(probe)  # the class's own: schedulers wrap that of the object
    except ModelError:
        raise
    except Exception as error:
        raise _TrialError from error
    return [param.detach() - each[0] for param, each in zip(params, given, strict=True)]


def _copy(
    optimizer: torch.optim.Optimizer, at: int, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer whose group `at` has these parameters, and others none."""
    nothing = nn.Parameter(torch.zeros(()))
    # An optimizer may hold another, with the same groups: no copy leads to a real parameter.
    memo: dict[int, Any] = {
        id(p): nothing for group in optimizer.param_groups for p in group["params"]
    }
    probe: Any = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = probe
    state: dict[Any, Any] = defaultdict(dict)
    memo[id(optimizer.state)] = state
    attributes = {k: v for k, v in vars(optimizer).items() if k != "step"}
    probe.__dict__.update({k: copy.deepcopy(v, memo) for k, v in attributes.items()})
    for number, group in enumerate(probe.param_groups):
        group["params"] = params if number == at else []
        if "param_names" in group:  # a rule by names is measured with the first of them
            group["param_names"] = group["param_names"][:1] * len(group["params"])
        group.update({k: False for k in _HOW if k in group})
        if group.get("lr") is not None:
            group["lr"] = _LR
    held = [p for p in optimizer.param_groups[at]["params"] if p in optimizer.state]
    # (The state of no elements does not say what others begin with.)
    example = next((p for p in held if p.numel()), next(iter(held), None))
    if example is not None:
        for param in params:
            state[param] = fresh_state(optimizer.state[example], example, param)
    return probe


def fresh_state(state: Mapping[str, Any], old: Tensor, new: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer made with itself for `old`, for `new` in its place.

    Raises ValueError for a state that is not the same everywhere: of steps, or read from values.
    """
    made: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != old.shape or value.dim() == 0:
            made[name] = copy.deepcopy(value)
            continue
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device")
        if isinstance(value, DTensor):
            value = value.to_local()
        number = value.flatten()[:1]
        if value.numel() and not bool((value == number).all()):
            raise ValueError(f"{name} is not the same everywhere")
        made[name] = torch.full_like(new.detach(), number.item() if value.numel() else 0.0)
    return made

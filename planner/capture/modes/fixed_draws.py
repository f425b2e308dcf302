"""Random numbers that are the same for every rank, replica and run: for `verify` alone.

A draw depends on who draws: the plan's ranks have other shares of the batch than the one
process. So that both can be compared, each op that draws gives fixed numbers instead,
inside its distribution's support, so that what they scale keeps its gradient. They are the
same for every element, whichever samples or shards are at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import PlanError

# Where a uniform draw of [0, 1) falls, and a normal one. No probability or bound that a
# model would use lies at it, so rounding doesn't decide a comparison. It is below the shares of
# tokens that models mask (0.15 and more), so that labels are left, and above those of layers that
# are dropped (0.1 and less).
_POINT = (math.sqrt(2) - 1) / 4

_Args = Mapping[str, Any]


class FixedDraws(TorchDispatchMode):
    """Answers every op that draws random numbers with fixed ones.

    Raises PlanError for an op that has no answer here.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or answer it."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = _by_name(func, args, kwargs)
        if given.get("train", given.get("training")) is False or any(
            isinstance(given.get(name), float | int) and given[name] == 0
            for name in ("p", "dropout_p", "dropout")
        ):
            return func(*args, **kwargs)
        packet = func._schema.name.split("::")[1]
        answer = _ANSWERS.get(packet.removesuffix("_"))
        if answer is None:
            raise PlanError(
                f"{func} draws random numbers for which verify has no fixed values to give to "
                "both sides; leave it out of the model to verify the plan"
            )
        drawn = answer(given)
        if packet.endswith("_"):
            return args[0].copy_(drawn)
        if given.get("out") is not None:
            return given["out"].copy_(drawn)
        return drawn


def _by_name(func: Any, args: tuple[Any, ...], kwargs: _Args) -> dict[str, Any]:
    """Return the arguments of a call by the names in the op's schema, defaults filled in.

    (But for dtypes, which schemas have as bare numbers.)
    """
    named = {
        argument.name: argument.default_value
        for argument in func._schema.arguments
        if argument.has_default_value() and argument.name != "dtype"
    }
    given = (argument.name for argument in func._schema.arguments)
    return named | dict(zip(given, args, strict=False)) | dict(kwargs)


def _filled(value: float, dtype: torch.dtype | None = None) -> Callable[[_Args], Tensor]:
    def fill(a: _Args) -> Tensor:
        return torch.full(a["size"], value, dtype=a.get("dtype") or dtype, device=a.get("device"))

    return fill


def _filled_like(value: Callable[[_Args], Any]) -> Callable[[_Args], Tensor]:
    """Fill a tensor like `self` with a number, or with a tensor's values broadcast to it."""

    def fill(a: _Args) -> Tensor:
        like = torch.empty_like(a["self"], dtype=a.get("dtype"))
        return like.copy_(torch.as_tensor(value(a)))

    return fill


def _between(low: Any, high: Any) -> Any:
    return low + math.floor(_POINT * (int(high) - int(low)))


def _randint(a: _Args) -> Tensor:
    return _filled(_between(a.get("low", 0), a["high"]), torch.int64)(a)


def _random(a: _Args) -> int:
    low, high = a.get("from") or 0, a.get("to")
    return low + 1 if high is None else _between(low, high)


def _normal(a: _Args) -> Tensor:
    mean, std = a["mean"], a["std"]
    if "self" in a:
        return _filled_like(lambda a: mean + _POINT * std)(a)
    value = torch.as_tensor(mean + _POINT * std)
    if "size" in a:
        return _filled(value.item())(a)
    return value


def _bernoulli(a: _Args) -> Tensor:
    p = a.get("p")
    return _filled_like(lambda a: torch.as_tensor(a["self"] if p is None else p) > _POINT)(a)


def _multinomial(a: _Args) -> Tensor:
    """Draw the most likely, and of equally likely ones the first.

    Probabilities are taken as equal where they differ by less than any rounding.
    """
    weights = a["self"] / a["self"].amax(-1, keepdim=True)
    order = (weights * 2**20).round().sort(dim=-1, descending=True, stable=True).indices
    if a["replacement"]:
        return order[..., :1].expand(*order.shape[:-1], a["num_samples"]).contiguous()
    return order[..., : a["num_samples"]].contiguous()


def _rrelu(a: _Args) -> Tensor:
    x, slope = a["self"], (a["lower"] + a["upper"]) / 2
    slopes = torch.where(x <= 0, slope, 1.0).to(x.dtype)
    a["noise"].copy_(slopes)  # which the backward reads
    return x * slopes


def _dropout(a: _Args) -> tuple[Tensor, Tensor]:
    if a["train"] is False:
        return a["input"].clone(), torch.ones_like(a["input"], dtype=torch.bool)
    kept = torch.full_like(a["input"], 1 - a["p"] > _POINT, dtype=torch.bool)
    return a["input"] * kept / max(1 - a["p"], _POINT), kept  # (no more than _POINT: none is kept)


_ANSWERS: dict[str, Callable[[_Args], Any]] = {
    "native_dropout": _dropout,
    "rand": _filled(_POINT),
    "randn": _filled(_POINT),
    "randint": _randint,
    "randperm": lambda a: torch.arange(
        a["n"], dtype=a.get("dtype") or torch.int64, device=a.get("device")
    ),
    "rand_like": _filled_like(lambda a: _POINT),
    "randn_like": _filled_like(lambda a: _POINT),
    "randint_like": _filled_like(lambda a: _between(a.get("low", 0), a["high"])),
    "random": _filled_like(_random),
    "uniform": _filled_like(lambda a: a["from"] + _POINT * (a["to"] - a["from"])),
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": _filled_like(lambda a: math.exp(a["mean"] + _POINT * a["std"])),
    "cauchy": _filled_like(lambda a: a["median"] + _POINT * a["sigma"]),
    "exponential": _filled_like(lambda a: -math.log(_POINT) / a["lambd"]),
    "geometric": _filled_like(lambda a: 1),
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    "poisson": lambda a: (a["self"] + _POINT).floor(),
    "binomial": lambda a: (a["count"] * a["prob"] + _POINT).floor(),
    "_standard_gamma": lambda a: a["self"].clone(),
    "_sample_dirichlet": lambda a: a["self"] / a["self"].sum(-1, keepdim=True),
    "rrelu_with_noise": _rrelu,
}

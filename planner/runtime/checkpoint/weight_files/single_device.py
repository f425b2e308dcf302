"""A plain training's file, ``torch.save({"model": ..., "optimizer": ...})``, and a checkpoint.

An optimizer's state dict numbers its parameters in the order of its groups; a checkpoint names
them. Names are in the file where the optimizer was made from ``model.named_parameters()``. Else
those of the model are laid beside the numbers by shape, in order: what fits in one way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlanError
from planner.runtime.checkpoint.optimizer_state import OptimizerNotes, state_key

_MODEL = ("model", "state_dict", "model_state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")


def split_training(found: Any) -> tuple[Any, Any]:
    """Return the model's and the optimizer's state dict of a file (None: it has no such)."""
    if isinstance(found, dict):
        model = next((found[key] for key in _MODEL if isinstance(found.get(key), dict)), None)
        if model is not None:
            return model, next((found[key] for key in _OPTIMIZER if key in found), None)
    return found, None


def from_state_dict(
    optimizer: Mapping[str, Any], model: Mapping[str, Tensor]
) -> tuple[OptimizerNotes, dict[str, Tensor]]:
    """Return what a checkpoint has of an optimizer's state dict: notes, and tensors by their keys.

    `model` has each tied parameter once. Raises PlanError where parameters can't be named.
    """
    names = _names(optimizer, model)
    notes = OptimizerNotes()
    for group in optimizer["param_groups"]:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        notes.groups.append({"params": [names[n] for n in group["params"]], "options": options})
    tensors = {}
    for number, state in optimizer["state"].items():
        fqn = names[number]
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                notes.values.setdefault(fqn, {})[name] = value
                continue
            notes.states.add(name)
            key = state_key(name, fqn, is_shaped=value.shape == model[fqn].shape)
            tensors[key] = value
    return notes, tensors


def to_state_dict(
    notes: OptimizerNotes, order: Sequence[str], stored: Mapping[str, Any], read: Callable[..., Any]
) -> dict[str, Any]:
    """Return the state dict that a plain script's optimizer loads; `order` is that of the model.

    `stored` has the keys of the checkpoint, of which `read` gives a tensor. Raises PlanError for
    state that was saved for pieces of a parameter.
    """
    place = {fqn: at for at, fqn in enumerate(order)}
    numbers: dict[str, int] = {}
    groups = []
    for group in notes.groups:
        held = sorted(group["params"], key=lambda fqn: place.get(fqn, len(place)))
        numbers |= {fqn: len(numbers) + at for at, fqn in enumerate(held)}
        groups.append(
            {**group["options"], "params": [numbers[fqn] for fqn in held], "param_names": held}
        )
    state: dict[int, dict[str, Any]] = {}
    for fqn, number in numbers.items():
        found = dict(notes.values.get(fqn, {}))
        for name in sorted(notes.states):
            keys = [state_key(name, fqn, is_shaped=shaped) for shaped in (True, False)]
            key = next((key for key in keys if key in stored), None)
            if key is not None:
                found[name] = read(key)
            elif any(each.startswith(keys[0] + "@") for each in stored):
                raise PlanError(
                    f"the optimizer's {name} of {fqn} was saved for pieces of it; convert to a "
                    "state-dict, which holds the model alone"
                )
        if found:
            state[number] = found
    return {"state": state, "param_groups": groups}


def _names(optimizer: Mapping[str, Any], model: Mapping[str, Tensor]) -> dict[int, str]:
    groups = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):
        named = [name for group in groups for name in group["param_names"]]
        strange = next((name for name in named if name not in model), None)
        if strange is not None:
            raise PlanError(
                f"the optimizer has parameter {strange}, and the model has none of that name; "
                "give a file whose model and optimizer were saved together"
            )
        return dict(zip(numbers, named, strict=True))
    shapes = [_shape(optimizer["state"].get(number, {})) for number in numbers]
    found = _fits(shapes, [tuple(tensor.shape) for tensor in model.values()])
    if found is None or len(groups) > 1:
        what = "in several groups" if len(groups) > 1 else "that fit its model in no single way"
        raise PlanError(
            f"the optimizer numbers its parameters, {what}, and does not name them; make it from "
            "model.named_parameters() (load its state_dict), and save again"
        )
    order = list(model)
    return {number: order[at] for number, at in zip(numbers, found, strict=True)}


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """That of a parameter, from its state: what most of its tensors have; None without any."""
    shapes = [tuple(t.shape) for t in state.values() if isinstance(t, Tensor) and t.dim()]
    return max(shapes, key=shapes.count) if shapes else None


def _fits(
    wanted: Sequence[tuple[int, ...] | None], there: Sequence[tuple[int, ...]]
) -> list[int] | None:
    """Return where `wanted` lies in `there`, in order; None where it does in no or several ways."""

    def matches(own: int, other: int) -> bool:
        return wanted[own] is None or wanted[own] == there[other]

    # ways[i][j]: in how many ways the first i lie in the first j.
    ways = [[1] * (len(there) + 1)]
    for own in range(len(wanted)):
        row = [0]
        for other in range(len(there)):
            row.append(row[-1] + (ways[own][other] if matches(own, other) else 0))
        ways.append(row)
    if ways[-1][-1] != 1:
        return None
    found, other = [], len(there)
    for own in range(len(wanted), 0, -1):
        while ways[own][other - 1]:
            other -= 1
        other -= 1
        found.append(other)
    return found[::-1]


def as_training(model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plain script saves."""
    return {_MODEL[0]: dict(model), _OPTIMIZER[0]: optimizer}


def count_steps(notes: OptimizerNotes) -> int:
    """Return how many steps an optimizer has counted; 0 where it counts none."""
    counts = [values.get("step", 0) for values in notes.values.values()]
    return max((int(c) for c in counts if isinstance(c, (int, float, torch.Tensor))), default=0)

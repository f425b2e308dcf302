"""The state of any torch optimizer, taken apart by parameter and put together on other pieces.

What an optimizer keeps of a parameter is, by its form,

    a tensor shaped like the parameter     cut as the parameter is, stored as such
    a single number, or no tensor at all   equal on all ranks with the parameter, stored once
    another tensor (rows, columns)         stored whole; of a parameter that the plan cuts it can
                                           only be given back to the same piece

No optimizer is named here. What is loaded goes through `load_state_dict` of the optimizer itself,
so its own hooks and conversions run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.utils._pytree import tree_flatten, tree_map_only

from planner.errors import PlanError
from planner.language.layout.pieces import Piece
from planner.language.lowering.holdings import model_key
from planner.runtime.checkpoint.parts import Part, local
from planner.runtime.state.rank_state import RankState

if TYPE_CHECKING:
    from planner.language.graph import TensorMeta
    from planner.language.layout.placements import Placements

_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Of a param group: how the update is computed, not which it is. The script's own stay."""


@dataclass(slots=True)
class OptimizerNotes:
    """What is stored of an optimizer beside tensors that are cut.

    Attributes:
        groups: param groups: names of their parameters (`params`) and `options` such as lr.
        values: by parameter and state: what is a number or no tensor.
        states: names of states that are stored as tensors of their own.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)

    def on_cpu(self) -> OptimizerNotes:
        """Return the same with all tensors on the CPU: another rank has no use for this device."""
        groups, values = tree_map_only(Tensor, lambda t: t.cpu(), (self.groups, self.values))
        return OptimizerNotes(groups, values, self.states)

    def merge(self, other: OptimizerNotes) -> None:
        """Take in those of another rank: the same groups over other parameters, or other groups,
        where a function made them of what the rank has.
        """
        for at, more in enumerate(other.groups):
            # Ranks of other stages have the same group over other parameters.
            own = self._like(more, at)
            if own is None:
                self.groups.append(more)
            else:
                own["params"] = list(dict.fromkeys((*own["params"], *more["params"])))
        for fqn, values in other.values.items():
            self.values.setdefault(fqn, values)
        self.states |= other.states

    def _like(self, group: Mapping[str, Any], at: int) -> dict[str, Any] | None:
        """Return the own group that another rank's is a part of: of its options, in its place if it
        can be; or that which has a parameter of it.
        """
        alike = [own for own in self.groups if _are_equal(own["options"], group["options"])]
        if at < len(self.groups) and any(own is self.groups[at] for own in alike):
            return self.groups[at]
        held = set(group["params"])
        shared = [own for own in self.groups if not held.isdisjoint(own["params"])]
        return next(iter((*shared, *alike)), None)


Params = Mapping[str, list[nn.Parameter]]
"""What the optimizer steps on, by the user's names."""


def take_apart(
    optimizer: torch.optim.Optimizer, params: Params, parts: Mapping[str, Part]
) -> tuple[list[Part], OptimizerNotes]:
    """Return the parts of the optimizer's tensors and the rest; `parts` are the parameters'."""
    notes = OptimizerNotes(groups=_groups(optimizer, params))
    found = []
    for fqn, copies in params.items():
        states = [optimizer.state[param] for param in copies if param in optimizer.state]
        part = parts[fqn]
        for name, value in states[0].items() if states else ():
            if not isinstance(value, Tensor) or value.dim() == 0:
                kept = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                notes.values.setdefault(fqn, {})[name] = kept
                continue
            tensors = tuple(local(state[name]) for state in states)
            notes.states.add(name)
            # By the local shape: what is shaped like the piece is cut as the piece is.
            if tensors[0].shape == part.tensors[0].shape:
                key, piece = _key(name, fqn), part.piece
            else:
                key, piece = _own_key(name, fqn, part.piece), Piece.whole(tensors[0].shape)
            found.append(Part(key=key, piece=piece, tensors=tensors, holding=part.holding))
    return found, notes


def whole_states(rank: RankState) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of whole parameters by name, on rank 0's CPU; {} elsewhere.

    Every rank calls it. Raises PlanError for state that is no tensor shaped like its parameter and
    differs from piece to piece.
    """
    metas = {meta.fqn: meta for meta in rank.graph.params if meta.requires_grad}
    held, piece_of = rank.held_states(), rank.pieces()
    kinds: dict[str, dict[str, Any]] = {}
    for fqn, state in held.items():
        shape = local(piece_of(metas[fqn])[0]).shape
        for name, value in state.items():
            is_shaped = isinstance(value, Tensor) and value.dim() and local(value).shape == shape
            if not is_shaped and isinstance(value, Tensor) and value.dim():
                raise PlanError(
                    f"the optimizer's {name} of {fqn} is not shaped like it, and ranks have pieces "
                    "of it; train with planner.apply, whose engine.save keeps it"
                )
            kept = value.cpu() if isinstance(value, Tensor) and not is_shaped else value
            kinds.setdefault(fqn, {})[name] = None if is_shaped else kept
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, kinds, group=rank.mesh.control)
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in every:
        for fqn, states in of_rank.items():
            merged.setdefault(fqn, states)
    # (Each kind of state of all parameters at once: who holds what is looked up for all of them.)
    for name in dict.fromkeys(name for states in merged.values() for name in states):
        shaped = [metas[f] for f in metas if merged.get(f, {}).get(name, 0) is None]

        def piece(meta: TensorMeta, name: str = name) -> tuple[Tensor, Placements]:
            return held[meta.fqn][name], piece_of(meta)[1]

        for fqn, value in rank.gathered(shaped, piece).items():
            if fqn in metas:
                merged[fqn][name] = value
    return {f: merged[f] for f in metas if f in merged} if dist.get_rank() == 0 else {}


class Assembly:
    """The state of an optimizer on its way in. Mutable: `parts` are to be read from a checkpoint,
    then `finish` gives all to the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Params,
        parts: Mapping[str, Part],
        notes: OptimizerNotes,
        stored: Metadata,
    ) -> None:
        """Raises PlanError for state that is of another piece of a parameter."""
        self._optimizer, self._params, self._notes = optimizer, params, notes
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        self.parts: list[Part] = []
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for fqn, copies in params.items():
            owned = [param for param in copies if id(param) in trained]
            states: list[dict[str, Any]] = [{} for _ in owned]
            for name, value in notes.values.get(fqn, {}).items():
                for state in states:
                    state[name] = copy.deepcopy(value)
            for name in sorted(notes.states) if owned else ():
                made = self._part(name, fqn, owned, parts[fqn], stored)
                if made is None:
                    continue
                tensors, part = made
                self.parts.append(part)
                for state, tensor in zip(states, tensors, strict=True):
                    state[name] = tensor
            self._states |= {
                param: state for param, state in zip(owned, states, strict=True) if state
            }

    def _part(
        self, name: str, fqn: str, owned: list[nn.Parameter], part: Part, stored: Metadata
    ) -> tuple[list[Tensor], Part] | None:
        key, own_key = _key(name, fqn), _own_key(name, fqn, part.piece)
        found = stored.state_dict_metadata
        if key in found:
            dtype = _dtype(found[key], found.get(model_key(fqn)), part)
            tensors = [torch.zeros_like(param, dtype=dtype).detach() for param in owned]
            piece = part.piece
        elif own_key in found:
            whole = found[own_key]
            assert isinstance(whole, TensorStorageMetadata)
            dtype = _dtype(whole, found.get(model_key(fqn)), part)
            tensors = [torch.zeros(whole.size, dtype=dtype, device=p.device) for p in owned]
            piece, key = Piece.whole(whole.size), own_key
        elif any(each.startswith(key + "@") for each in found):
            raise PlanError(
                f"the optimizer's {name} of {fqn} was saved for a piece of it, and is not shaped "
                "like it; load under a plan that cuts it in the same way"
            )
        else:
            return None
        locals_ = tuple(map(local, tensors))
        return tensors, Part(key=key, piece=piece, tensors=locals_, holding=part.holding)

    def finish(self) -> None:
        """Give the optimizer its state and the options of its param groups."""
        # A state dict numbers parameters in the order of the groups.
        numbers = {
            id(param): at
            for at, param in enumerate(p for g in self._optimizer.param_groups for p in g["params"])
        }
        groups = [
            {
                **group,
                **self._options(at, group["params"]),
                "params": [numbers[id(param)] for param in group["params"]],
            }
            for at, group in enumerate(self._optimizer.param_groups)
        ]
        state = {numbers[id(param)]: state for param, state in self._states.items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _options(self, at: int, held: list[nn.Parameter]) -> dict[str, Any]:
        """The stored options of a group: by its parameters, or by its number where it has none."""
        names = {id(param): fqn for fqn, copies in self._params.items() for param in copies}
        fqns = {names[id(param)] for param in held}
        for group in self._notes.groups:
            if fqns.intersection(group["params"]):
                return copy.deepcopy(group["options"])
        if not held and at < len(self._notes.groups):
            return copy.deepcopy(self._notes.groups[at]["options"])
        return {}


def _groups(optimizer: torch.optim.Optimizer, params: Params) -> list[dict[str, Any]]:
    names = {id(param): fqn for fqn, copies in params.items() for param in copies}
    return [
        {
            "params": list(dict.fromkeys(names[id(param)] for param in group["params"])),
            "options": copy.deepcopy(
                {k: v for k, v in group.items() if k != "params" and k not in _CHOICES}
            ),
        }
        for group in optimizer.param_groups
    ]


def _are_equal(options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether the options of two groups are the same; a learning rate may be a tensor."""
    (own, form), (more, other_form) = tree_flatten(options), tree_flatten(others)
    return form == other_form and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(own, more, strict=True)
    )


def _key(state: str, fqn: str) -> str:
    return f"optim.{state}.{fqn}"


def state_key(state: str, fqn: str, *, is_shaped: bool) -> str:
    """Return the name of the state of a whole parameter: shaped like it, or in its own way."""
    return _key(state, fqn) + ("" if is_shaped else "@whole")


def _own_key(state: str, fqn: str, piece: Piece) -> str:
    """The name of what is not shaped like a parameter: it belongs to one piece of it."""
    if piece == Piece.whole(piece.shape):
        return state_key(state, fqn, is_shaped=False)
    runs = ";".join(",".join(f"{start}+{length}" for start, length in dim) for dim in piece.runs)
    return _key(state, fqn) + f"@{runs}"


def _dtype(state: Any, param: Any, part: Part) -> torch.dtype:
    """The dtype of a state here: it follows the parameter's where it did when it was saved."""
    saved: torch.dtype = state.properties.dtype
    if param is not None and saved == param.properties.dtype:
        return part.tensors[0].dtype
    return saved

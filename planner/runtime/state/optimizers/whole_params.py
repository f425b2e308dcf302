"""Parameters made whole for an optimizer that reads more of them than an element's own values.

    gradient pieces  -- all-gather -->  whole, on the parameter's owner alone
                                        the optimizer steps there (Muon: on the whole matrix)
    value pieces     <-- broadcast --   the new value, of which each rank takes its piece

The ranks that hold the pieces of a parameter deal who owns which, by size, so that each has about
as much of the optimizer's state as it would of pieces, and a share of its work. An owner keeps the
whole value beside its piece. One parameter at a time is whole on the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.language.layout.pieces import Piece
from planner.language.layout.placements import Placements
from planner.language.layout.sharing import sharing
from planner.language.lowering.holdings import Holding
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.gather import whole
from planner.runtime.state.optimizers.reach import fresh_state


@dataclass(frozen=True, slots=True, kw_only=True)
class CutParam:
    """A parameter of which this rank has a piece.

    Attributes:
        fqn: the user's name.
        piece: what has the piece and its gradient.
        box: which part of the whole it is.
        placements: how it is cut on the lowered axes.
        axes: the axes that cut it, coarse cuts first.
        owner: the owner's place on each of these axes.
        value: the whole on its owner; None on other ranks.
    """

    fqn: str
    piece: nn.Parameter
    box: Piece
    placements: Placements
    axes: tuple[str, ...]
    owner: tuple[int, ...]
    value: nn.Parameter | None


class WholeParams:
    """A rank's cut parameters that the optimizer steps on as wholes. Mutable: values, gradients."""

    def __init__(
        self,
        pieces: Iterable[tuple[str, nn.Parameter, Holding, Placements]],
        mesh: Mesh,
        *,
        sharded: bool,
    ) -> None:
        """`pieces` are those to make whole, each with what the rank holds of it; the ranks that
        share them call this together. Those that no axis cuts are left out. `sharded` says that
        FSDP2 cuts parameters over "shards".
        """
        self._mesh = mesh
        self.params: list[CutParam] = []
        loads: dict[tuple[str, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for fqn, piece, holding, placements in pieces:
            is_shard = sharded and isinstance(piece, DTensor)
            axes = cutting_axes(placements, mesh, sharded=is_shard)
            if not axes:
                continue
            sizes = [mesh.size(axis) for axis in axes]
            # Each to the rank with the fewest elements so far. All ranks see the same parameters in
            # the same order, so they agree on the deal without a message.
            load = loads[axes]
            number = min(range(prod(sizes)), key=lambda at: load[at])
            load[number] += prod(holding.piece.shape)
            owner = _place(number, sizes)
            value = whole(piece, placements, mesh)
            is_owner = owner == tuple(mesh.rank(axis) for axis in axes)
            self.params.append(
                CutParam(
                    fqn=fqn,
                    piece=piece,
                    box=holding.piece,
                    placements=placements,
                    axes=axes,
                    owner=owner,
                    value=nn.Parameter(value.clone()) if is_owner else None,
                )
            )

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the wholes that this rank owns in the place of pieces; others it does not step on.

        Raises ValueError for a state that the optimizer made before, and that can't be made whole.
        """
        by_piece = {id(param.piece): param for param in self.params}
        for group in optimizer.param_groups:
            kept, names = [], []
            for held, name in zip_longest(group["params"], group.get("param_names", ())):
                param = by_piece.get(id(held))
                # A state that was made before (Adagrad's) was made for the piece; the owner needs
                # it for the whole.
                state = optimizer.state.pop(held, None) if param is not None else None
                value = held if param is None else param.value
                if value is not None:
                    kept.append(value)
                    names.append(name)
                    if state:
                        optimizer.state[value] = fresh_state(state, held, value)
            group["params"] = kept
            if "param_names" in group:
                group["param_names"] = names

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the values of the pieces; the ranks that share them call it together."""
        for param in self.params:
            value = whole(param.piece, param.placements, self._mesh)
            if param.value is not None:
                param.value.copy_(value)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Give each owner the whole gradients; the ranks that share them call it together."""
        for param in self.params:
            # All ranks that share the parameter agree on that, as it has a gradient on all or on
            # none.
            if param.piece.grad is not None:
                grad = whole(param.piece.grad, param.placements, self._mesh)
                if param.value is not None:
                    param.value.grad = grad

    @torch.no_grad()
    def hand_out(self) -> None:
        """Bring the values that owners stepped on to the pieces; called together."""
        for param in self.params:
            if param.piece.grad is None:
                continue  # passed over
            piece = param.piece
            local = piece.to_local() if isinstance(piece, DTensor) else piece.detach()
            value = self._from_owner(param, local)
            # A piece may be several boxes of the whole (segments, two cuts of a dim).
            for chunk in param.box.chunks(local.element_size()):
                source = value[tuple(slice(a, b) for a, b in chunk.box)]
                local[tuple(slice(a, b) for a, b in chunk.local)].copy_(source)
            if param.value is not None:
                param.value.grad = None

    def _from_owner(self, param: CutParam, like: Tensor) -> Tensor:
        """The whole value, along one axis after the other."""
        if param.value is not None:
            value = param.value.detach()
        else:
            value = like.new_empty(param.box.shape)
        message = torch.view_as_real(value) if value.is_complex() else value
        # Before a turn the value is with ranks at the owner's place on this axis and all later
        # ones; after it, with ranks at the owner's place on the later ones.
        for at, (axis, number) in enumerate(zip(param.axes, param.owner, strict=True)):
            later = zip(param.axes[at + 1 :], param.owner[at + 1 :], strict=True)
            if all(self._mesh.rank(other) == place for other, place in later):
                dist.broadcast(message, group=self._mesh.group(axis), group_src=number)
        return value


def cutting_axes(placements: Placements, mesh: Mesh, *, sharded: bool) -> tuple[str, ...]:
    """Return the axes over which ranks hold different pieces of a parameter."""
    shared = sharing(placements, is_sharded=sharded)
    lowered = tuple(axis for axis in shared.cut if mesh.size(axis) > 1)
    return (*lowered, placements.shards) if shared.chunked else lowered


def stepped_on(
    params: Mapping[str, list[nn.Parameter]], made_whole: WholeParams | None
) -> dict[str, list[nn.Parameter]]:
    """Return what the optimizer steps on here, by name, from all that the rank trains."""
    if made_whole is None:
        return dict(params)
    by_piece = {id(param.piece): param for param in made_whole.params}
    found: dict[str, list[nn.Parameter]] = {}
    for fqn, copies in params.items():
        stepped = []
        for copy in copies:
            param = by_piece.get(id(copy))
            value = copy if param is None else param.value
            if value is not None:
                stepped.append(value)
        if stepped:
            found[fqn] = stepped
    return found


def _place(number: int, sizes: list[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        place.append(at)
    return tuple(reversed(place))

"""Products beside the collectives that bring their input, or take their result, in pieces of rows.

    pieces = GatheredInPieces(...)           made for each call of a block
    x      = redistribute(own rows)          starts a gather for each piece, multiplies each piece
                                             that has come, and puts both where they belong
    y      = product(x, weight)              finds its result made

Both are autograd's nodes as without pieces, with the backward they have then: what is made in
pieces is handed to them (`made`). A product whose result is scattered in pieces is never whole:
its node gives zeros of that shape that take no memory, which the redistribution alone is given.

Which ops these are follows from the program (`planner.language.ops.weight_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.runtime.process import collectives
from planner.runtime.stage.weight_grads import multiplied


class Multiplied(NamedTuple):
    """A product's other factor, and how they are multiplied (`WeightProduct`)."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    scaling: str

    def times(self, x: Tensor) -> Tensor:
        """Return x times the weight."""
        return multiplied(
            x, self.weight, self.bias, transposed=self.transposed, scaling=self.scaling
        )


class GatheredInPieces:
    """A gather and the products behind it, of one call of a block. Mutable: who takes a product's
    result has it alone.
    """

    def __init__(
        self, group: str, dim: int, pieces: int, products: Sequence[tuple[Any, ...]]
    ) -> None:
        """`products` are fields of a `Multiplied` for each."""
        self._group, self._dim, self._pieces = group, dim, pieces
        self._products = [Multiplied(*each) for each in products]
        self._made: list[Tensor | None] = [None] * len(products)

    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, of this rank's [..., rows, ..., inner]."""
        ranks, dim = collectives.size(self._group), self._dim
        whole = _whole(x, dim, ranks)
        by_piece = _by_piece(whole, dim, ranks, self._pieces)
        results: list[Tensor] = []

        def use(piece: int, gathered: Tensor) -> None:
            rows = gathered.unflatten(0, (ranks, -1))  # of each rank, as it has them
            by_piece[piece].copy_(rows.movedim(0, dim))
            for at, product in enumerate(self._products):
                made = product.times(rows)
                if not piece:
                    results.append(made.new_empty((*whole.shape[:-1], made.shape[-1])))
                into = _by_piece(results[at], dim, ranks, self._pieces)
                into[piece].copy_(made.movedim(0, dim))

        collectives.gather_each(x.chunk(self._pieces, dim), self._group, use)
        self._made = list(results)
        return whole

    def take(self, at: int, _: Tensor) -> Tensor | None:
        """Return the result of that product, once, if it is there."""
        found, self._made[at] = self._made[at], None
        return found


class ScatteredInPieces:
    """A product and the scatter behind it, of one call of a block. Mutable: the scatter's result is
    there from the one to the other.
    """

    def __init__(self, group: str, dim: int, pieces: int, product: tuple[Any, ...]) -> None:
        """`product` has the fields of a `Multiplied`."""
        self._group, self._dim, self._pieces = group, dim, pieces
        self._product = Multiplied(*product)
        self._scattered: Tensor | None = None

    @torch.no_grad()
    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., rows, ..., inner] and scatter the result; what is returned has the
        result's shape alone.
        """
        ranks, dim = collectives.size(self._group), self._dim
        by_piece = _by_piece(x, dim, ranks, self._pieces)

        def make(piece: int) -> Tensor:
            made = self._product.times(by_piece[piece].movedim(dim, 0))
            return made.flatten(0, 1)  # a rank's rows behind those of another

        parts = collectives.scatter_each(make, self._pieces, self._group)
        shape = (*x.shape[:-1], parts[0].shape[-1])
        self._scattered = torch.cat(parts, dim)
        return x.new_zeros(()).expand(shape)

    def scatter(self, _: Tensor) -> Tensor:
        """Return this rank's rows of the sum."""
        found, self._scattered = self._scattered, None
        assert found is not None
        return found


def _whole(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s * (ranks if d == dim else 1) for d, s in enumerate(x.shape)])


def _by_piece(whole: Tensor, dim: int, ranks: int, pieces: int) -> tuple[Tensor, ...]:
    """Return views of each piece of all ranks' rows, [..., ranks, rows, ...]."""
    return whole.unflatten(dim, (ranks, pieces, -1)).unbind(dim + 1)

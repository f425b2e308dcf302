"""How a tensor lies on one mesh axis: Shard(dim), Replicate or Partial, as in DTensor; or Own.

Torch-free: the search and the plan file use these; `planner.runtime` turns them into
`torch.distributed.tensor` placements at the edges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Shard:
    """Split in equal pieces along tensor dim `dim` (never negative).

    With `segments` the dim is a row of that many equal parts (the q, k and v of a fused
    projection; the sequences of a flattened batch) and each part is split in equal
    contiguous pieces: a rank holds its piece of every part, side by side.
    """

    dim: int
    segments: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" + (f"x{self.segments}" if self.segments > 1 else "")


@dataclass(frozen=True, slots=True)
class Replicate:
    """The whole tensor on every rank of the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Own:
    """Every rank holds a value of its own, which means nothing to other ranks: there is no whole.

    Such are the order in which a rank sorted its rows, and the ends of its runs. Nothing is
    redistributed from or to it (`has_way`). Along `dim` a rank's value has as many entries as
    a shard of it (None: it is as large as the whole). `segments` are those of the shard whose
    rows the value is about: it counts for rows that lie so, and for no others.
    """

    dim: int | None = None
    segments: int = 1

    def __str__(self) -> str:
        along = "" if self.dim is None else f"({self.dim})"
        return f"O{along}" + (f"x{self.segments}" if self.segments > 1 else "")


Placement = Shard | Replicate | Partial | Own


def has_way(source: Placement, target: Placement) -> bool:
    """Whether a tensor that lies as `source` can be brought to lie as `target`."""
    return source == target or not (isinstance(source, Own) or isinstance(target, Own))


def cut_dim(placement: Placement) -> int | None:
    """Return the dim along which a rank has a part of the entries; None where it has as many as
    the whole.
    """
    return placement.dim if isinstance(placement, Shard | Own) else None


_CUT = re.compile(r"S\((\d+)\)(?:x([1-9]\d*))?")
_OWN = re.compile(r"O(?:\((\d+)\))?(?:x([1-9]\d*))?")


@lru_cache(maxsize=1024)
def parse_placement(text: str) -> Placement:
    """Parse ``R``, ``P``, ``S(dim)``, ``S(dim)xSEGMENTS``, or the same with ``O`` (`Own`, whose dim
    may be left out); raise LayoutError on anything else.
    """
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    if match := _CUT.fullmatch(text):
        return Shard(int(match[1]), int(match[2] or 1))
    if match := _OWN.fullmatch(text):
        return Own(None if match[1] is None else int(match[1]), int(match[2] or 1))
    raise LayoutError(f"placement {text!r} is unknown; use R, P or S(dim), for example S(0)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSharding:
    """Placements of one op's tensor inputs and outputs on one mesh axis.

    `inputs` follows the order in which tensors appear in the op's arguments (`Op.inputs`).
    Prints as ``R,S(0)->S(2)``.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.inputs)) + "->" + ",".join(map(str, self.outputs))

    @classmethod
    def parse(cls, text: str) -> OpSharding:
        """Inverse of `str`; raise LayoutError on a malformed text."""
        return _parse_sharding(text)


@lru_cache(maxsize=4096)
def _parse_sharding(text: str) -> OpSharding:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise LayoutError(f"op sharding {text!r} has no '->'; write it like R,S(0)->S(2)")
    return OpSharding(inputs=_parse_list(left), outputs=_parse_list(right))


def _parse_list(text: str) -> tuple[Placement, ...]:
    return tuple(parse_placement(part) for part in text.split(",")) if text else ()

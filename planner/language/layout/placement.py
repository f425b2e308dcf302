"""How a tensor lies on one mesh axis: Shard(dim), Replicate or Partial, as in DTensor; Own or Held.

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

    `mirrored`, every second part is dealt to the ranks from the last to the first (`piece_in`). Of
    two parts of a sequence a rank then has as far a piece from the end as from the start, and
    causal work is dealt evenly ("zig-zag": Liu et al. 2023, arXiv 2310.01889, and Megatron-LM's
    head and tail). There is an even number of parts then.
    """

    dim: int
    segments: int = 1
    mirrored: bool = False

    def __str__(self) -> str:
        return f"S({self.dim}){_in_parts(self)}"


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
    rows the value is about, and `mirrored` too: it counts for rows that lie so, and for no others.
    """

    dim: int | None = None
    segments: int = 1
    mirrored: bool = False

    def __str__(self) -> str:
        along = "" if self.dim is None else f"({self.dim})"
        return f"O{along}{_in_parts(self)}"


@dataclass(frozen=True, slots=True)
class Held:
    """The whole tensor on rank `number` of the axis, and nothing of it on the others.

    So lie parameters of experts' own modules on ep. Nothing is redistributed from or to it.
    """

    number: int

    def __str__(self) -> str:
        return f"H({self.number})"


def _in_parts(placement: Shard | Own) -> str:
    sign = "z" if placement.mirrored else "x"
    return f"{sign}{placement.segments}" if placement.segments > 1 else ""


def piece_in(segment: int, rank: int, ranks: int, *, mirrored: bool) -> int:
    """Return which piece of a segment a rank has. It is also the rank that has the piece `rank`.

    Mirrored, on four ranks and in two segments: rank 0 has pieces 0 and 3, rank 1 has 1 and 2.
    """
    return ranks - 1 - rank if mirrored and segment % 2 else rank


Placement = Shard | Replicate | Partial | Own | Held


def has_way(source: Placement, target: Placement) -> bool:
    """Whether a tensor that lies as `source` can be brought to lie as `target`."""
    return source == target or not (
        isinstance(source, Own | Held) or isinstance(target, Own | Held)
    )


def cut_dim(placement: Placement) -> int | None:
    """Return the dim along which a rank has a part of the entries; None where it has as many as
    the whole.
    """
    return placement.dim if isinstance(placement, Shard | Own) else None


_PARTS = r"(?:x([1-9]\d*)|z([1-9]\d*[02468]|[2468]))?"
_CUT = re.compile(r"S\((\d+)\)" + _PARTS)
_OWN = re.compile(r"O(?:\((\d+)\))?" + _PARTS)


@lru_cache(maxsize=1024)
def parse_placement(text: str) -> Placement:
    """Parse ``R``, ``P``, ``S(dim)``, ``S(dim)xSEGMENTS``, ``S(dim)zSEGMENTS`` (mirrored, an even
    number), or the same with ``O`` (`Own`, whose dim may be left out); raise LayoutError on
    anything else.
    """
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    if match := _CUT.fullmatch(text):
        return Shard(int(match[1]), int(match[2] or match[3] or 1), match[3] is not None)
    if match := _OWN.fullmatch(text):
        dim = None if match[1] is None else int(match[1])
        return Own(dim, int(match[2] or match[3] or 1), match[3] is not None)
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

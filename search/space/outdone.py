"""Shapes that cut sequences where replicas could take whole samples.

With cp = c a rank works on the c-th part of b samples. Where g divides both, as many ranks with
cp = c / g and g times as many replicas have the c/g-th part of b/g samples each: the same rows, the
same microbatches, and the same ranks that share parameters. They gather keys and values of fewer
positions from fewer ranks (or exchange heads with fewer, or pass parts as large on in fewer
rounds), and the rank with the last positions meets no more keys. So nothing speaks for cutting what
g divides: neither time nor memory.

    dp 1, cp 4, microbatches of 2      is outdone by      dp 2, cp 2, microbatches of 1

With a level inside cp (hp) the same holds of the outer one. Left out of account is work on
positions alone (a table of positions, angles of rotary ones), which the samples of a microbatch
share: with more cp a rank has less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from planner.language.layout.axes import rest_axis
from search.space.configuration import Shape

OUTDONE = "cp: replicas of whole samples do the same, and exchange less"
"""The rule by which a search leaves them out."""


def without_outdone(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return the shapes without those that another of them outdoes, in order."""
    every = set(shapes)
    return tuple(
        shape for shape in shapes if (other := _outdoing(shape)) == shape or other not in every
    )


def _outdoing(shape: Shape) -> Shape:
    """Return the shape that has more replicas for what cp and the microbatch size share."""
    shared, replicas = gcd(shape.cp, shape.microbatch_size), rest_axis().name
    sizes = {"cp": shape.cp // shared, replicas: shape.degrees[replicas] * shared}
    return replace(
        shape,
        degrees=shape.degrees.with_sizes(**sizes),
        microbatch_size=shape.microbatch_size // shared,
    )

"""Weight gradients beside collectives of a backward: what of these shows then.

The runtime starts the collective, makes the weight gradients that were left since the one before,
and waits (`planner.runtime.stage.beside_collectives`). Of a collective of s seconds beside C
seconds of products, `beside_seconds` shows: max(0, s - C) where neither slows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from costmodel.time.communication import beside_seconds
from planner.language.graph import Program
from planner.language.ops.weight_products import products_beside
from profiles import Profile


class Beside(NamedTuple):
    """What runs beside the collectives of a block's backward."""

    hidden_s: Mapping[str, float]
    """By redistribution: seconds of its collective that do not show."""
    weight_s: float
    """Seconds of the weight gradients that are made beside them: no later job makes these."""


def beside_collectives(
    local: Program,
    profile: Profile,
    *,
    collective_s: Mapping[str, float],
    weight_s: Mapping[str, float],
) -> Beside:
    """Return what a bound local program hides; `collective_s` are the seconds of redistributions'
    collectives in the backward, `weight_s` those of products' weight gradients, by op.
    """
    hidden_s, made_s = {}, 0.0
    for name, products in products_beside(local).items():
        compute_s = sum(weight_s[product] for product in products)
        made_s += compute_s
        alone_s = collective_s.get(name, 0.0)
        hidden_s[name] = alone_s - shown_seconds(profile, alone_s, compute_s)
    return Beside(hidden_s, made_s)


def shown_seconds(profile: Profile, collectives_s: float, compute_s: float) -> float:
    """Return what shows of collectives beside so many seconds of compute.

    On a CPU messages take the cores that compute: nothing is hidden.
    """
    if profile.cluster.device_type == "cpu":
        return collectives_s
    return float(beside_seconds(profile, collectives_s, compute_s))

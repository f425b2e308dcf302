"""What users may accept of a plan that cuts a batch across which the model computes, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.errors import LayoutError
from planner.language.graph.mixing import Kind

LOCAL_SAMPLES = "local-samples"
ACCEPTED: Mapping[str, tuple[Kind, ...]] = {
    LOCAL_SAMPLES: ("mixed", "pairs", "normaliser", "size"),
    "local-buffers": ("buffer", "repeated"),
    "unknown-ops": ("unknown",),
}
"""Kinds of findings by the name that accepts them: each part of the batch computes with its own
samples; replicas and microbatches write buffers of their own; ops without a rule are taken to
compute on parts what they compute on the whole batch."""


def accepted_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return a name, or names, each once; raise LayoutError for one that accepts nothing."""
    names = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    check_accept(names)
    return names


def check_accept(names: Iterable[str]) -> None:
    """Raise LayoutError for a name that accepts nothing."""
    for name in names:
        if name not in ACCEPTED:
            *others, last = ACCEPTED
            raise LayoutError(f"`accept` {name} was given; use {', '.join(others)} or {last}")

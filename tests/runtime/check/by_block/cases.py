"""Plans of tiny models to prove by blocks, and what is needed for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.proofs.by_block.prove import Derived, prove
from planner.runtime.proofs.by_block.report import Proof
from tests.captures import capture_module
from tests.model_matrix import model_matrix


@cache
def captured(name: str) -> tuple[ModelGraph, ModelSource]:
    """The graph and the source of a model of the matrix."""
    model = model_matrix()[name]
    if model.needs_transformers:
        pytest.importorskip("transformers")
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    return graph, ModelSource(
        path=Path("model.py"), build=model.build, batch=model.batch, loss=model.loss,
        dependencies=(),
    )  # fmt: skip


def plan_of(name: str, **options: Any) -> Plan:
    """A plan without a search, of two samples a microbatch where not given."""
    return default_plan(captured(name)[0], **({"microbatch_size": 2} | options))


def proof_of(
    name: str, plan: Plan | None = None, *, change: Any = None, memory_bytes: int | None = None,
    **options: Any,
) -> Proof:  # fmt: skip
    """The proof of a plan, in which `change` breaks what is derived."""
    graph, source = captured(name)
    keep = (lambda derived: derived) if change is None else change
    return prove(
        plan or plan_of(name, **options), graph, source, change=keep, memory_bytes=memory_bytes
    )


__all__ = ["Derived", "captured", "plan_of", "proof_of"]

"""Tiny captured models in double precision, for sharding tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from planner.language.graph import ModelGraph, Program, from_json, to_json
from tests.builders import tiny_models
from tests.captures import capture_module

NAMES = tuple(tiny_models())


@cache
def captured(name: str) -> ModelGraph:
    model = tiny_models()[name]
    if model.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = model.build()
    graph = capture_module(module, model.batch(2), model.batch(3), loss=model.loss, name=name)
    return replace(graph, classes=tuple(in_double(program) for program in graph.classes))


def in_double(program: Program) -> Program:
    """Return the program with every float32 a float64, casts inside included."""
    return from_json(_doubled(to_json(program)))


def _doubled(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _doubled(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_doubled(value) for value in data]
    return "float64" if data == "float32" else data

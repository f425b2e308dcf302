"""N1: ops carry the user's line, which decides nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.capture.source.capture_cache import load_graph
from planner.errors import CaptureError
from planner.language.graph import ModelGraph, from_json, to_json

MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return helper(self.fc(x))


def helper(x):
    return x - x.mean(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(9))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def model():
    return Model()


def batch(size):
    return (torch.randn(size, 4),)
"""


def line_of(graph: ModelGraph, op: str) -> str:
    return next(o.line for o in graph.classes[0].ops if o.name == op)


def test_lines_are_those_of_the_user_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A helper's own line, from a kept capture too; a comment moves it and no fingerprint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    first, kept = load_graph(path), load_graph(path)
    number = MODEL.splitlines().index("    return x - x.mean(0)") + 1
    expected = f"{tmp_path.name}/model.py:{number}: `return x - x.mean(0)`"
    assert line_of(first, "mean") == line_of(kept, "mean") == expected
    assert line_of(first, "linear").endswith("`return helper(self.fc(x))`")
    path.write_text(MODEL.replace("\ndef helper", "\n# A comment.\n\n\ndef helper"))
    moved = load_graph(path)
    assert line_of(moved, "mean") == expected.replace(f":{number}:", f":{number + 3}:")
    assert moved.fingerprint == first.fingerprint
    assert moved == first
    assert hash(moved.classes[0]) == hash(first.classes[0])


def test_a_number_that_is_no_line_through_two_sizes_is_refused(tmp_path: Path):
    """N1: 4 for two samples and 9 for three is a square, not 5 n - 6."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("x.pow(2).mean()", "x.pow(2).sum() / len(x) ** 2"))
    with pytest.raises(CaptureError, match=r"div.*model\.py:\d+: .*grows as the square of their"):
        load_graph(path, use_cache=False)


def test_lines_survive_json_by_class(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    graph = load_graph(path, use_cache=False)
    text = json.dumps(to_json(graph))
    assert line_of(from_json(json.loads(text)), "mean") == line_of(graph, "mean")
    assert len(graph.classes) < len(graph.blocks)
    assert text.count("`return x - x.mean(0)`") == 2 * len(graph.classes)  # mean and difference
    assert "`return x" not in json.dumps(to_json(graph, lines=False))

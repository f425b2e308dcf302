"""Running `planner` commands in this process, in an empty folder with a cache of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import cli
from tests import captures


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left: its exit code and output."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The one line of stderr of a refused command, whose exit code is 2."""
        lines = self.stderr.strip().splitlines()
        assert self.code == 2, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("planner: ")
        return lines[0]


@pytest.fixture
def planner(tmp_path, monkeypatch, capfd) -> Callable[..., Finished]:
    """Run `planner ARGUMENTS…` in an empty folder; an equal model is exported once a session."""
    monkeypatch.setattr("planner.capture.module.capture_module", captures.capture_module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> Finished:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Finished(code=code, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture
def write_model(tmp_path) -> Callable[..., Path]:
    """Write a chain of equal linear layers as a model file; `body` is a line of its forward."""

    def write(name: str = "model.py", *, layers: int = 4, width: int = 8, body: str = "") -> Path:
        path = tmp_path / name
        path.write_text(
            MODEL_FILE.format(layers=layers, width=width, body=body or "pass  # nothing more")
        )
        return path

    return write


MODEL_FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({width}, {width}) for _ in range({layers}))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        {body}
        return x.square().mean()


def model():
    return Net()


def batch(size):
    return (torch.randn(size, {width}),)
"""

"""Names of autograd functions: of the code, not of where or how it is written down."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from planner.language.graph.function_keys import function_key
from planner.runtime.stage.calls.autograd_functions import find_function

ROUND = """
import torch

{before}
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round(){after}

    @staticmethod
    def backward(ctx, grad):
        return grad{times}
"""


def load(folder: Path, name: str, *, before: str = "", after: str = "", times: str = "") -> type:
    file = folder / f"{name}.py"
    file.write_text(ROUND.format(before=before, after=after, times=times))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Round


def test_comments_and_the_modules_name_do_not_count_and_code_does(tmp_path):
    plain = load(tmp_path, "plain")
    noted = load(tmp_path, "noted", before="# a comment\n\n", after="  # to the nearest")
    other = load(tmp_path, "other", times=" * 2")
    assert function_key(plain) == function_key(noted)
    assert function_key(plain).startswith("Round@")
    assert function_key(other) != function_key(plain)
    assert find_function(function_key(other)) is other


def test_a_function_without_source_is_named_by_its_byte_code():
    made = type("Made", (torch.autograd.Function,), {})
    scope: dict = {}
    exec("def forward(ctx, x): return x\ndef backward(ctx, g): return g", scope)
    made.forward, made.backward = map(staticmethod, (scope["forward"], scope["backward"]))
    assert function_key(made) == function_key(made)
    assert function_key(made).startswith("Made@")

"""Keys tell modules apart by all that they compute with, and hold in every process."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from planner.language.graph.module_keys import attributes, class_of, module_key


class Part(nn.Module):
    def __init__(self, **held):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self).update(held)

    def forward(self, x):
        return self.layer(x)


class Derived(Part):
    pass


def double(x):
    return 2 * x


def scaled(factor):
    return lambda x: factor * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"top": 1}, {"top": 2}),
        ({"config": SimpleNamespace(top=1)}, {"config": SimpleNamespace(top=2)}),
        ({"config": {"top": [1, {2}]}}, {"config": {"top": [1, {3}]}}),
        ({"act": double}, {"act": torch.sin}),
        ({"act": scaled(1)}, {"act": scaled(2)}),
        ({"act": functools.partial(double, x=1)}, {"act": functools.partial(double, x=2)}),
        ({"table": np.arange(5000)}, {"table": np.arange(5000)[::-1]}),
        ({"kind": torch.float32}, {"kind": torch.float64}),
        ({"training": True}, {"training": False}),
    ],
)
def test_attributes_tell(one, other):
    assert module_key(Part(**one)) == module_key(Part(**one))
    assert module_key(Part(**one)) != module_key(Part(**other))


def test_a_note_that_values_are_there_does_not_tell():
    """A library notes it of a real model, which runs a plan, and not of one on meta."""
    assert module_key(Part(_is_hf_initialized=True)) == module_key(Part())


def test_code_shapes_ties_and_hooks_tell():
    tied = Part()
    tied.second = nn.Linear(2, 2)
    apart = Part()
    apart.second = nn.Linear(2, 2)
    tied.second.weight = tied.layer.weight
    wide, hooked = Part(), Part()
    wide.layer = nn.Linear(2, 3)
    hooked.layer.register_forward_hook(lambda *args: None)
    keys = [module_key(m) for m in (Part(), Derived(), tied, apart, wide, hooked)]
    assert len(set(keys)) == len(keys)
    assert class_of(keys[1]) == "Derived"
    assert "layer" not in dict(attributes(Part(top=3)))


def test_a_meta_copy_has_the_key_of_its_model():
    with torch.device("meta"):
        empty = Part(config=SimpleNamespace(top=1))
    assert module_key(empty) == module_key(Part(config=SimpleNamespace(top=1)))


def test_a_key_is_the_same_under_every_hash_seed():
    code = (
        "from tests.graph.test_module_keys import Part, module_key, scaled\n"
        "part = Part(names={'a', 'b', 'c'}, act=scaled(3), at=object())\n"
        "part.register_forward_hook(lambda *args: None)\n"
        "print(module_key(part))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_what_a_capture_notes_by_hooks_does_not_tell():
    """A note that grows with each op would make the keys of all layers long, and unlike."""
    plain, noted, users = Part(), Part(), Part()

    def note(*_):
        pass

    users.layer.register_forward_hook(note)
    note_of_ours = FunctionType(note.__code__, {"__name__": "planner.capture.repeats.trace"})
    noted.layer.register_forward_hook(note_of_ours)
    assert module_key(noted) == module_key(plain) != module_key(users)

"""What a user is told of a failing capture: their line, what is wrong with it, what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from planner.capture.diagnose import calling_line, explain, first_line, node_line, source_line
from planner.errors import ModelError


def failure(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("GuardOnDataDependentSymNode: u0", "use torch.where or a mask"),
        ("Cannot copy out of meta tensor", "it needs a tensor's values"),
        ("found at least two devices", "a tensor lies on another device"),
        ("fake tensor in the exported program constant", "none of its ops made"),
        ("something else", "torch.export says RuntimeError: something else"),
    ],
)
def test_each_failure_has_its_advice_and_the_users_line(text, advice):
    told = explain(failure(RuntimeError(text)))
    assert advice in told
    assert f"at {__file__}:" in told
    assert "raise error" in told


def test_our_own_message_deep_in_a_chain_is_told_as_it_is():
    error = RuntimeError("export failed")
    error.__cause__ = ModelError("forward returned a tuple")
    error.__cause__.__context__ = error  # a ring must end
    assert explain(error) == "forward returned a tuple"


def test_lines_are_those_of_the_users_frame():
    assert f"at {__file__}:" in calling_line()
    assert first_line(ValueError("\n  one\ntwo")) == "ValueError: one"
    assert first_line(ValueError()) == "ValueError"
    trace = (
        'File "/home/me/model.py", line 7, in forward\n    y = self.fc(x)\n'
        f'File "{torch.__file__}", line 1, in linear\n    return linear(x)'
    )
    node = SimpleNamespace(meta={"stack_trace": trace})
    assert node_line(node) == " at /home/me/model.py:7: `y = self.fc(x)`"
    assert source_line(node) == "me/model.py:7: `y = self.fc(x)`"
    assert node_line(SimpleNamespace(meta={})) == ""

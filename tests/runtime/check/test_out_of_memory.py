"""What a rank without memory tells: what it held, beside what its plan predicts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.runtime.state import out_of_memory
from planner.runtime.state.out_of_memory import describe, is_out_of_memory, watch


@pytest.fixture(autouse=True)
def _no_states(monkeypatch):
    """Engines of other tests may be alive."""
    monkeypatch.setattr(out_of_memory, "_states", type(out_of_memory._states)())


@pytest.mark.parametrize(
    ("error", "is_found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("DefaultCPUAllocator: can't allocate"), False),
    ],
)
def test_errors_that_say_there_was_no_memory(error, is_found):
    assert is_out_of_memory(error) == is_found


class State:
    """Two parameters of 4 KiB that share a storage, a buffer, a gradient, two states."""

    def __init__(self, memory: list[dict[str, float]]) -> None:
        whole = torch.zeros(2048)
        self.params = [nn.Parameter(whole[:1024]), nn.Parameter(whole[1024:])]
        grad = torch.zeros(1024)
        self.stages = {
            0: SimpleNamespace(parameters=lambda: self.params, passed={"mask": torch.zeros(512)})
        }
        self.optimizer = SimpleNamespace(
            state={self.params[0]: {"step": 3, "exp_avg": torch.zeros(256), "kept": [grad[:1]]}}
        )
        self.trained = SimpleNamespace(gradients=lambda: [grad, grad.view(2, 512)])
        self.plan = SimpleNamespace(estimate={"memory": memory} if memory else {})
        self.mesh = SimpleNamespace(device=torch.device("cpu"), rank=lambda axis: 1)


def rows(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines()[2:] if line.strip()]
    return {line[2:28].strip(): [line[28:40].strip(), line[40:].strip()] for line in lines}


def test_what_is_held_stands_beside_the_prediction_of_the_own_pipeline_rank():
    predicted = {"parameter_bytes": 8192, "gradient_bytes": 4096, "total_bytes": 2**14}
    state = State([{"parameter_bytes": 1}, predicted])
    watch(state)
    text, peak = describe(torch.OutOfMemoryError("CUDA out of memory.\nTried"), 3)
    assert text.splitlines()[0] == "planner: rank 3 ran out of memory: CUDA out of memory."
    found = rows(text)
    assert found["parameters"] == ["8.00 KiB", "10.00 KiB"]  # a storage counts once
    assert found["gradients"] == ["4.00 KiB", "4.00 KiB"]
    assert found["optimizer"] == ["-", "5.00 KiB"]
    assert found["activations and all else"][0] == "4.00 KiB"
    assert found["at the height"][0] == "16.00 KiB"
    assert peak > 2**20


@pytest.mark.parametrize("memory", [[], [{"parameter_bytes": 1}]])
def test_a_plan_without_a_prediction_tells_what_was_held(memory):
    state = State(memory)
    watch(state)
    found = rows(describe(torch.OutOfMemoryError("no"), 0)[0])
    assert {predicted for predicted, _ in found.values()} == {"-"}
    assert found["parameters"][1] == "10.00 KiB"


def test_before_an_engine_and_without_a_message():
    text, peak = describe(torch.OutOfMemoryError(""), 1)
    assert text.startswith("planner: rank 1 ran out of memory: OutOfMemoryError\n")
    assert text.endswith("before planner.apply had made its engine")
    assert peak is None

"""What a rank that ran out of memory held, beside what its plan predicts."""

from __future__ import annotations

import resource
import sys
import weakref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from planner.runtime.process import device as devices
from planner.runtime.state.rank_state import RankState
from planner.units import format_bytes

_states: list[weakref.ref[RankState]] = []
"""Those of this process, as they were made: an error that leaves the script has none of them."""

_HELD = (("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"))
_STATE = ("optimizer", "optimizer_bytes")
_REST = "activations and all else"

_SAID = (
    "DefaultCPUAllocator: can't allocate",
    "CUDA error: out of memory",  # of the driver: pinned host memory, a context
    "ALLOC_FAILED",  # of cuBLAS, cuDNN: a workspace
)
"""What errors of no type of their own say where there was no memory."""


def watch(state: RankState) -> None:
    """Let `describe` find what an engine holds for as long as it lives."""
    _states.append(weakref.ref(state))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host where it is the device, had no memory for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
    )


def describe(error: BaseException, rank: int) -> tuple[str, int | None]:
    """Return predicted against actual by category, as lines, and the most bytes that were held.

    Each engine of the script has a table; the most that was held is that of the process.
    """
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    lines = [f"planner: rank {rank} ran out of memory: {first}"]
    states = [state for each in _states if (state := each()) is not None]
    if not states:
        return "\n".join((*lines, "  before planner.apply had made its engine")), None
    held = [_actual(state) for state in states]
    peak = _peak_bytes(states[0].mesh.device)
    everything = sum(sum(actual.values()) for actual in held)
    for number, (state, actual) in enumerate(zip(states, held, strict=True), 1):
        if len(states) > 1:
            model = state.plan.model.name
            lines.append(f"  engine {number} of {len(states)}, {model}, without the others'")
        others = everything - sum(actual.values())
        lines += _table(state, actual, peak - others)
    return "\n".join(lines), peak


def _table(state: RankState, actual: dict[str, int], peak: int) -> list[str]:
    every = state.plan.estimate.get("memory", ())
    place = state.mesh.rank("pp")
    predicted = dict(every[place]) if place < len(every) else {}
    lines = [f"  {'':26}{'predicted':>12}{'actual':>12}"]
    known = dict((*_HELD, _STATE))
    for name, held in actual.items():
        there = predicted.get(known[name])
        told = "-" if there is None else format_bytes(there)
        lines.append(f"  {name:26}{told:>12}{format_bytes(held):>12}")
    total = predicted.get("total_bytes")
    fields = ("-", "-")
    if total is not None:
        rest = total - sum(predicted.get(known[name], 0) for name in actual)
        fields = format_bytes(rest), format_bytes(total)
    lines.append(f"  {_REST:26}{fields[0]:>12}{format_bytes(peak - sum(actual.values())):>12}")
    lines.append(f"  {'at the height':26}{fields[1]:>12}{format_bytes(peak):>12}")
    return lines


def _actual(state: RankState) -> dict[str, int]:
    """Bytes by category on the device."""
    device = state.mesh.device
    params = [p for stage in state.stages.values() for p in stage.parameters()]
    buffers = [t for stage in state.stages.values() for t in stage.passed.values()]
    states = [] if state.optimizer is None else tree_leaves(list(state.optimizer.state.values()))
    return {
        "parameters": _bytes([*params, *buffers], device),
        "gradients": _bytes(state.trained.gradients(), device),
        "optimizer": _bytes([t for t in states if isinstance(t, Tensor)], device),
    }


def _peak_bytes(device: torch.device) -> int:
    """The most bytes that were ever held on the device; on a CPU, by the process."""
    if devices.is_accelerator(device):
        return int(devices.of(device).max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _bytes(tensors: object, device: torch.device) -> int:
    storages = {}
    for tensor in tensors:  # type: ignore[attr-defined]
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if held.device.type == device.type:
            storage = held.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())

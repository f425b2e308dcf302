"""Price of one local program (a block on one tp rank): time, kept bytes, peaks, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from costmodel.execution import Execution
from costmodel.execution.executed import rated_profile
from costmodel.execution.executed_program import executed_times
from costmodel.execution.saves import as_saved, saved_instead
from costmodel.memory.block.block_bytes import peak_bytes
from costmodel.memory.block.recomputed import selective_bytes
from costmodel.memory.saved import saved_tensors
from costmodel.table.fusion import Kernels
from costmodel.time.block.profiled_times import profiled_times
from costmodel.topology import Axis
from planner.graph import Program
from planner.layout.experts import spread_params
from planner.ops.weight_products import deferrable_products
from planner.units import DTYPE_BYTES
from profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """One forward and one backward of a program on one rank.

    Seconds: `forward_s` and `backward_s` are compute, with `host_*_s` the part of them the
    device waits for the host; `weight_s` is the part of the backward that makes weight
    gradients, where a job table has them made later; `recomputed_s` what selective recomputation
    adds to the backward; `*_comm_s` are collectives, which run exposed, and what ranks wait for
    each other at them. `has_backward` says whether a gradient arrives at all: before a model's
    first trained parameter none does, and nothing is recomputed there.
    Bytes: `saved_bytes` are kept from forward to backward, activation inputs included and
    `saved_output_bytes` (outputs that this program itself keeps) too; `side_bytes` are kept
    inputs that need no gradient (rotary tables, masks; at `side_positions`), which all blocks
    of a stage share and `saved_bytes` leaves out; `input_bytes` are its activation inputs,
    all that full recompute keeps, and `selective_bytes` what selective recompute keeps
    besides (see `recomputed.selective_bytes`); peaks as in `block_bytes.peak_bytes`.
    Params are local: trainable elements' bytes and those of frozen ones and buffers
    (`frozen_param_bytes` without buffers and constants); `spread_bytes` in `num_spread` tensors
    are the part of the trainable ones that lies on the experts' mesh.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    recomputed_s: float
    forward_comm_s: float
    backward_comm_s: float
    host_forward_s: float
    host_backward_s: float
    forward_flop: float
    backward_flop: float
    has_backward: bool
    saved_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    side_bytes: int
    side_positions: tuple[int, ...]
    input_bytes: int
    selective_bytes: int
    selective_unsaved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    param_bytes: int
    frozen_bytes: int
    frozen_param_bytes: int
    num_params: int
    spread_bytes: int
    num_spread: int


def price_program(
    local: Program,
    profile: Profile,
    *,
    axes: Mapping[str, Axis],
    execution: Execution,
    recomputed: frozenset[str] = frozenset(),
    polls: bool = False,
    alike: ProgramCost | None = None,
) -> ProgramCost:
    """Price a bound program that `planner.layout.lowering.lower` made local.

    `axes` are those it was lowered on, `execution` the runtime that runs it; `recomputed` names the
    ops that run again under selective recomputation. Collectives run on the compute stream's time,
    as the runtime waits for each. Bytes are those of eager kernels. `polls`: as in `Split`. `alike`
    is the program's price on another profile of the same machine, whose bytes are the same.
    """
    has_backward = any(local.tensor[name].requires_grad for name in local.outputs)
    recomputed = recomputed if has_backward else frozenset()
    if execution.prices == "rates":
        rated = rated_profile(profile)
        times = executed_times(local, rated, axes=axes, recomputed=recomputed, polls=polls)
    else:
        kernels: Kernels = "fused" if execution.kernels == "fused" else "eager"
        times = profiled_times(local, profile, axes=axes, recomputed=recomputed, kernels=kernels)
    accumulate_s = accumulate_seconds(local, profile)
    seconds: dict[str, Any] = {
        "forward_s": times.forward.device_s + times.forward.host_s,
        "backward_s": times.backward.device_s + times.backward.host_s + accumulate_s,
        "weight_s": times.weight_s + accumulate_s,
        "recomputed_s": times.recomputed.device_s + times.recomputed.host_s,
        "forward_comm_s": times.forward_comm_s,
        "backward_comm_s": times.backward_comm_s,
        "host_forward_s": times.forward.host_s,
        "host_backward_s": times.backward.host_s,
    }
    if alike is not None:
        return replace(alike, **seconds)
    return ProgramCost(
        **seconds,
        forward_flop=times.forward_flop,
        backward_flop=times.backward_flop,
        has_backward=has_backward,
        **_bytes_held(as_saved(local, profile), profile.cluster.device_type, execution, recomputed),
    )


def _bytes_held(
    local: Program, device_type: str, execution: Execution, recomputed: frozenset[str]
) -> dict[str, Any]:
    """Return the bytes of a program's price, by field."""
    tensor = local.tensor
    trainable = [n for n in local.params if _is_trainable(local, n)]
    frozen = [n for n in local.params if not _is_trainable(local, n)]
    experts = spread_params(local)
    spread = [n for n in trainable if n in experts]
    instead = saved_instead(local, execution)
    saved = saved_tensors(local, device_type=device_type, instead=instead)
    forward_peak, backward_peak = peak_bytes(saved, deferrable_products(local))
    selective_kept, unsaved = selective_bytes(saved, recomputed)
    activations = [n for n in local.inputs if tensor[n].requires_grad]
    side_bytes = _bytes(local, [n for n in saved.inputs if n not in activations])
    return {
        "saved_bytes": saved.num_bytes - side_bytes,
        "saved_input_bytes": _bytes(local, [n for n in saved.inputs if n in activations]),
        "saved_output_bytes": _bytes(local, saved.outputs),
        "side_bytes": side_bytes,
        "side_positions": tuple(
            position
            for position, name in enumerate(local.inputs)
            if name in saved.inputs and name not in activations
        ),
        "input_bytes": _bytes(local, activations),
        "selective_bytes": selective_kept,
        "selective_unsaved_bytes": unsaved,
        "forward_peak_bytes": forward_peak,
        "backward_peak_bytes": backward_peak - side_bytes,
        "param_bytes": _bytes(local, trainable),
        "frozen_bytes": _bytes(local, frozen),
        "frozen_param_bytes": _bytes(local, [n for n in frozen if tensor[n].kind == "param"]),
        "num_params": len(trainable),
        "spread_bytes": _bytes(local, spread),
        "num_spread": len(spread),
    }


def accumulate_seconds(program: Program, profile: Profile, *, cut: float = 1) -> float:
    """Return what adding a microbatch's gradients to the sum so far takes.

    With `cut`, if a rank holds only that part of every parameter.
    """
    trainable = [n for n in program.params if _is_trainable(program, n)]
    return profile.step_seconds(
        "accumulate",
        num_bytes=sum(4 * prod(program.tensor[name].shape_at(1)) for name in trainable) / cut,
        num_tensors=len(trainable),
    ).seconds


def _is_trainable(program: Program, name: str) -> bool:
    meta = program.tensor[name]
    return meta.kind == "param" and meta.requires_grad


def _bytes(program: Program, names: tuple[str, ...] | list[str]) -> int:
    metas = (program.tensor[name] for name in names)
    return sum(prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype] for meta in metas)

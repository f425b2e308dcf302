"""In-place writes made pure: later readers see a new tensor instead of a changed one."""

from __future__ import annotations

from typing import Any

import torch

from planner.capture.diagnose import node_line
from planner.capture.record import Recorder, is_view
from planner.errors import CaptureError
from planner.graph import Ref, TensorMeta


def pure_form(
    record: Recorder, node: torch.fx.Node, target: Any, args: Any
) -> tuple[Any, Any, Any]:
    """Turn an in-place op on an activation into its pure form; keep writes to buffers.

    Returns (pure target, args, tensor written). The target is None for a copy_ of an
    equal shape and dtype, whose value is simply its source.
    """
    if not isinstance(args[0], Ref) or record.tensors[args[0].name].kind == "buffer":
        return target, args, None
    written = args[0]
    if record.tensors[written.name].kind != "activation":
        raise CaptureError(
            f"the model writes in place into {written.name}{node_line(node)}; "
            "write the out-of-place form (x = x + y)"
        )
    name = target._schema.name.split("::")[1].removesuffix("_")
    if name == "copy":
        old = record.tensors[written.name]
        new = record.tensors[args[1].name]
        if (old.shape, old.dtype) == (new.shape, new.dtype):
            return None, args, written
        return torch.ops.aten.copy.default, args, written
    packet = getattr(torch.ops.aten, name, None)
    overload = target._overloadname
    if packet is None or overload not in packet.overloads():
        raise CaptureError(
            f"the in-place op {target}{node_line(node)} has no pure form; "
            "write the out-of-place form"
        )
    return getattr(packet, overload), args, written


def rebind(
    record: Recorder, written: Ref, value: Ref, env: dict[torch.fx.Node, Any], node: torch.fx.Node
) -> None:
    """Make later uses of a tensor written in place, and of its base, see `value`."""
    while True:
        record.stale.update(record.views_of(written.name) - {value.name})
        for key, held in env.items():
            if held == written:
                env[key] = value
        maker = record.maker.get(written.name)
        if maker is None or not is_view(maker.target):
            return
        packet = maker.target.split(".")[1]
        if packet not in ("slice", "select"):
            raise CaptureError(
                f"the model writes in place through {packet}{node_line(node)}; only writes "
                "through slices and indices can be followed; write the out-of-place form"
            )
        base = maker.args[0]
        assert isinstance(base, Ref)
        meta = record.tensors[base.name]
        fresh = record.fresh(f"{base.name}_written")
        record.tensors[fresh] = TensorMeta(
            name=fresh,
            shape=meta.shape,
            dtype=meta.dtype,
            kind="activation",
            requires_grad=meta.requires_grad or record.tensors[value.name].requires_grad,
        )
        scatter = f"aten.{packet}_scatter.default"
        record.emit(node, scatter, fresh, (base, value, *maker.args[1:]), (), (fresh,))
        written, value = base, Ref(fresh)

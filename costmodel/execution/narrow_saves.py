"""What products in fp8 save: their inputs as they were cast for them, not as they were made.

A product of a layer that multiplies in 8 bits casts what it takes, and keeps the cast for its
weight's gradient: half the bytes of bf16. With sequence parallelism the cast comes first and ranks
gather 8 bits. Products of a head, adapters and attention stay in 16 bits.

Source: Transformer Engine, "FP8 primer" and `module/linear.py`, which saves the quantized input.
Copies of weights in 8 bits are not counted: recipes keep the parameters themselves in fp8 instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_kernels import is_layer_product, products_of_head
from planner.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.layout.redistribution.redistribute import REDISTRIBUTE
from planner.ops.record import family_of
from profiles import Profile

CAST = "aten._to_copy.default"
NARROW = "float8_e4m3fn"
"""Of the narrow dtypes, fp4 among them, the bytes of this are counted."""


def as_saved(local: Program, profile: Profile) -> Program:
    """Return a rank's bound program whose products take narrow casts of what they took.

    It is for bytes alone: the seconds of casts are in the rates of narrow products. The same
    program where the runtime multiplies in 16 bits.
    """
    if not isinstance(profile, ExecutedProfile) or not profile.multiplies_narrow:
        return local
    tensor = local.tensor
    maker = {name: op for op in local.ops for name in op.outputs}
    ops: list[Op] = []
    made: dict[str, TensorMeta] = {}

    def cast(name: str) -> str:
        """Return the narrow copy of a tensor; a gathered one is gathered from narrow parts."""
        new = f"{name} in 8 bits"
        if new in made:
            return new
        op = maker.get(name)
        if op is not None and op.target == REDISTRIBUTE and op.inputs[0] in tensor:
            source = cast(op.inputs[0])
            args = map_refs(op.args, partial(_renamed, names={op.inputs[0]: source}))
            ops.append(replace(op, name=new, args=args, outputs=(new,)))
        else:
            ops.append(Op(name=new, target=CAST, args=(Ref(name),), outputs=(new,)))
        made[new] = replace(tensor[name], name=new, dtype=NARROW, kind="activation")
        return new

    in_head = products_of_head(local)
    for op in local.ops:
        if op.name in in_head or not is_layer_product(op, local):
            ops.append(op)
            continue
        taken = op.inputs[family_of(op.target).first_factor]
        narrow = {taken: cast(taken)}
        ops.append(replace(op, args=map_refs(op.args, partial(_renamed, names=narrow))))
    used = Counter(name for op in ops for name in op.inputs) + Counter(local.outputs)
    kept = [op for op in ops if op.target != REDISTRIBUTE or used[op.outputs[0]]]
    return replace(local, ops=tuple(kept), tensors=(*local.tensors, *made.values()))


def _renamed(ref: Ref, names: Mapping[str, str]) -> Ref:
    return Ref(names.get(ref.name, ref.name))

"""What other runtimes save for a backward where ours saves something else.

fused_saves      a fused kernel saves what it takes and makes the rest again: a gated activation
                 saves the product before it, rotary positions save nothing of what they turn
attention_copies attention saves its own copies of queries, keys and values, and not the tensor that
                 they were made in together
weighs_inside    rows of experts that come back are not saved
regathers        what tp ranks gather for a product is saved as each rank's part, and gathered
                 again for the weight's gradient (Korthikanti et al. 2022, arXiv 2205.05198,
                 section 4.2.2)
loss_bytes       how much memory a loss over parts of a vocabulary takes for a logit

A product of a layer that multiplies in 8 bits casts what it takes, and keeps the cast for its
weight's gradient: half the bytes of bf16 (`as_saved`; Transformer Engine, "FP8 primer" and
`module/linear.py`, which saves the quantized input). With sequence parallelism the cast comes first
and ranks gather 8 bits. Products of a head, adapters and attention stay in 16 bits. Copies of
weights in 8 bits are not counted: recipes keep the parameters themselves in fp8 instead. Where a
runtime says so (`keeps_narrow`), frozen weights of layers lie in 8 bits alone, and a gated
activation saves a cast of what it takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from costmodel.execution.executed import ExecutedProfile, rated_profile
from costmodel.execution.executed_kernels import (
    is_attention,
    is_layer_product,
    kernels_of,
    products_of_head,
)
from costmodel.execution.execution import Execution
from costmodel.memory.saved import SavedInstead, StorageMap, map_storages
from planner.language.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.language.layout.placement import Replicate, Shard, parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.experts import grouped_products
from planner.language.ops.families.entries.routing import UNSORT_ROWS
from planner.language.ops.families.losses.cross_entropy import (
    SIZED_CROSS_ENTROPY,
    VOCAB_CROSS_ENTROPY,
)
from planner.language.ops.record import family_of, packet_of
from profiles import Profile

CAST = "aten._to_copy.default"
NARROW = "float8_e4m3fn"
"""Of the narrow dtypes, fp4 among them, the bytes of this are counted."""
NARROW_SUFFIX = " in 8 bits"
"""What a tensor's cast is called behind the tensor's own name."""


def saved_instead(local: Program, execution: Execution) -> SavedInstead:
    """Return, by op of a bound program, what its backward makes again, each with what is saved for
    that instead.
    """
    if execution.prices == "profile":
        return {}
    found: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    names = local.tensor.keys()
    if execution.fused_saves:
        for ops in kernels_of(local, execution):
            # A kernel of attention's weights saves these and not the scores: the product with the
            # values saves them, too (megatron/core/fusions/fused_softmax.py). Megatron-LM of 2021
            # does the same, and its rates were fitted as if it saved both.
            if execution.vendor_attention and any(_makes_weights(op, local) for op in ops):
                continue
            # Where another kernel saves what this one makes, that is saved all the same.
            inside = _inside(ops)
            if "activations" in execution.keeps_narrow and any(_is_gate(op) for op in ops):
                inside = {
                    made: tuple(_narrow(name) if _narrow(name) in names else name for name in taken)
                    for made, taken in inside.items()
                }
                inside |= {
                    name: (_narrow(name),)
                    for op in ops
                    for name in op.inputs
                    if _narrow(name) in names and name not in inside
                }
            for op in ops:
                found[op.name] |= inside
    if execution.weighs_inside:
        _weigh_inside(local, found)
    if execution.attention_copies:
        storages = map_storages(local)
        for op in local.ops:
            if is_attention(op):
                # It makes nothing again, its own result neither.
                copied = _parts_of_others(op, storages)
                if execution.samples_first and local.tensor[op.outputs[0]].shape_at(1)[0] > 1:
                    copied += op.outputs[:1]
                found[op.name] = dict.fromkeys(copied, ())
    if execution.regathers:
        gathered = {op.outputs[0]: op.inputs for op in local.ops if _gathers(op, local)}
        # (Rows of experts are put in order behind the gather, and saved whole.)
        for op in set(local.ops).difference(grouped_products(local)):
            found[op.name] |= {name: gathered[name] for name in op.inputs if name in gathered}
    return found


def _parts_of_others(op: Op, storages: StorageMap) -> tuple[str, ...]:
    """Return the inputs of an op that lie in larger storages."""
    tensor, storage = storages.program.tensor, storages.storage
    return tuple(n for n in op.inputs if tensor[n].bytes_at(1) < storage[n].num_bytes)


def _weigh_inside(local: Program, found: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Note what is saved of experts whose rows are weighed between their products."""
    maker = {name: op for op in local.ops for name in op.outputs}
    grouped = grouped_products(local)
    for op in local.ops:
        if op.target == UNSORT_ROWS:
            # The weights' gradients come from inside: the order alone is saved.
            rows, order = op.inputs[:2]
            found[op.name][rows] = (order,)
    for op in grouped:
        active = maker.get(op.inputs[0])
        if active is not None and maker.get(active.inputs[0]) in grouped:
            # Not gated: what the activation makes is saved to weigh it, what that makes by the
            # product.
            found[active.name][active.inputs[0]] = (active.inputs[0], active.outputs[0])
            found[op.name][active.outputs[0]] = ()


def _makes_weights(op: Op, local: Program) -> bool:
    """Whether an op makes attention's weights (samples, heads, queries, keys); a router's softmax
    makes scores of experts.
    """
    return packet_of(op.target) == "softmax" and len(local.tensor[op.outputs[0]].shape) == 4


def _inside(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return what a kernel makes, each with what the kernel takes for it."""
    taken: dict[str, tuple[str, ...]] = {}
    for op in ops:
        sources = dict.fromkeys(name for of in op.inputs for name in taken.get(of, (of,)))
        taken |= {name: tuple(sources) for name in op.outputs}
    return taken


def _gathers(op: Op, local: Program) -> bool:
    if op.target != REDISTRIBUTE or not local.tensor[op.inputs[0]].requires_grad:
        return False
    source, target = (parse_placement(str(text)) for text in op.args[2:4])
    return isinstance(source, Shard) and isinstance(target, Replicate)


def with_sized_losses(program: Program, bytes_per_logit: int) -> Program:
    """Return a local program whose losses over parts of a vocabulary take so much memory."""
    if not any(op.target == VOCAB_CROSS_ENTROPY for op in program.ops):
        return program
    sized = (("bytes_per_logit", bytes_per_logit),)
    ops = (
        replace(op, target=SIZED_CROSS_ENTROPY, kwargs=(*op.kwargs, *sized))
        if op.target == VOCAB_CROSS_ENTROPY
        else op
        for op in program.ops
    )
    return replace(program, ops=tuple(ops))


def as_saved(local: Program, profile: Profile) -> Program:
    """Return a rank's bound program whose products take narrow casts of what they took.

    It is for bytes alone: the seconds of casts are in the rates of narrow products. The same
    program where the runtime multiplies in 16 bits, or saves the input itself (torchao).
    """
    if not isinstance(profile, ExecutedProfile):
        return local
    in_head = products_of_head(local)
    saving = {
        op.name
        for op in local.ops
        if op.name not in in_head and is_layer_product(op, local)
        if (casts := profile.casts_of(op)) and casts.saves_narrow
    }
    if not saving:
        return local
    tensor = local.tensor
    maker = {name: op for op in local.ops for name in op.outputs}
    ops: list[Op] = []
    made: dict[str, TensorMeta] = {}

    def cast(name: str) -> str:
        """Return the narrow copy of a tensor; a gathered one is gathered from narrow parts."""
        new = _narrow(name)
        if new in made:
            return new
        op = maker.get(name)
        # The cast comes ahead of the collective, so that ranks gather 8 bits.
        if op is not None and op.target == REDISTRIBUTE and op.inputs[0] in tensor:
            source = cast(op.inputs[0])
            args = map_refs(op.args, partial(_renamed, names={op.inputs[0]: source}))
            ops.append(replace(op, name=new, args=args, outputs=(new,)))
        else:
            ops.append(Op(name=new, target=CAST, args=(Ref(name),), outputs=(new,)))
        made[new] = replace(tensor[name], name=new, dtype=NARROW, kind="activation")
        return new

    keeps = rated_profile(profile).execution.keeps_narrow
    weights: set[str] = set()
    for op in local.ops:
        if op.name not in saving:
            if "activations" in keeps and _is_gate(op):
                # Of the product that it was cut from, where it is a part of one.
                cast(_cut_from(op.inputs[0], maker))
            ops.append(op)
            continue
        if "weights" in keeps:
            weights |= {name for name in op.inputs if _is_frozen(tensor[name])}
        taken = op.inputs[family_of(op.target).first_factor]
        narrow = {taken: cast(taken)}
        ops.append(replace(op, args=map_refs(op.args, partial(_renamed, names=narrow))))
    used = Counter(name for op in ops for name in op.inputs) + Counter(local.outputs)
    # A gather of wide parts that only casts took is gone.
    kept = [op for op in ops if op.target != REDISTRIBUTE or used[op.outputs[0]]]
    tensors = (
        replace(meta, dtype=NARROW) if meta.name in weights else meta for meta in local.tensors
    )
    return replace(local, ops=tuple(kept), tensors=(*tensors, *made.values()))


def casts_made_again(held: Program, again: frozenset[str]) -> frozenset[str]:
    """Return the ops that recomputation runs again of a program with casts (`as_saved`).

    A cast runs again where what it casts is made again (Transformer Engine then saves the wide
    input itself: set_save_original_input), or where all that read it run again. Any other is kept,
    and what it cast is not.
    """
    readers: dict[str, list[str]] = defaultdict(list)
    for op in held.ops:
        for name in op.inputs:
            readers[name].append(op.name)
    maker = {name: op.name for op in held.ops for name in op.outputs}
    casts = {op.name: op for op in held.ops if op.target == CAST and _is_narrow(op.name)}
    kept = {
        name
        for name, op in casts.items()
        if maker.get(op.inputs[0]) not in again and not again.issuperset(readers[name])
    }
    return again.union(casts) - kept


def _is_narrow(name: str) -> bool:
    return name.endswith(NARROW_SUFFIX)


def _narrow(name: str) -> str:
    """Return what a tensor's cast to 8 bits is called."""
    return name + NARROW_SUFFIX


def _is_gate(op: Op) -> bool:
    return packet_of(op.target) == "silu"


def _is_frozen(meta: TensorMeta) -> bool:
    return meta.kind == "param" and not meta.requires_grad


def _cut_from(name: str, maker: Mapping[str, Op]) -> str:
    """Return the tensor that a part was cut from; the tensor itself where it is no part."""
    op = maker.get(name)
    return op.inputs[0] if op is not None and packet_of(op.target) == "chunk" else name


def _renamed(ref: Ref, names: Mapping[str, str]) -> Ref:
    return Ref(names.get(ref.name, ref.name))

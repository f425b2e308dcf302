"""A row as what `estimate` takes: a template's graph, a plan, and a runtime on its machine."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Literal

from costmodel.cache import CostCache
from costmodel.estimate import Estimate, estimate, step_seconds
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_kernels import is_attention, is_product
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.row_words import modules_recomputed
from costmodel.table.rows.run_row import RowError, RunRow
from planner.language.graph import Op, Program
from planner.language.layout.axes import Degrees
from planner.language.ops.record import family_of
from planner.language.plan import (
    BlocksRecompute,
    ClassLayout,
    ClassRecompute,
    ClusterRef,
    ModelRef,
    Plan,
    StagePlan,
    batch_spec,
)
from planner.language.schedule.registry import stage_to_pp_rank
from planner.language.templates import Adapters, Transformer, build_transformer
from planner.language.templates.splits import cp_layouts, tp_layouts
from profiles import Profile

SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved_1f1b",
    "gpipe": "fthenb",
    "zb-1p": "zb_h1",
    "zb-2p": "zb_h2",
    "zb-v": "zb_v",
}
"""Our schedules by the names of rows. ZB-2p has the idle time of ZB-1p within a step, with twice
the microbatches in flight: what it gains is that ranks begin the next step at different times (Qi
et al. 2023, section 4), which an estimate of one step does not show."""


KEPT_MODELS = 64
"""Models on machines whose prices are kept while a table is priced."""


def transformer_of(run: RunRow) -> Transformer:
    """Return the model of a row, as the trainers of large models write it."""
    # A vocabulary that tp splits is padded, as Megatron-LM does (make-vocab-size-divisible-by).
    multiple = run.vocab_multiple or (128 if run.tp > 1 else 1)
    vocab = padded_vocab(run.sizes.vocab, multiple * run.tp)
    # Where tp has more ranks than there are heads of keys, each rank has one, whole.
    kv_heads = run.sizes.kv_heads
    if run.tp > kv_heads and not run.tp % kv_heads:
        kv_heads = run.tp
    return replace(
        run.sizes,
        vocab=vocab,
        kv_heads=kv_heads,
        dropout=run.stack.dropout,
        fused_attention=run.stack.flash_attention,
        # Adapters alone are trained, where there are any.
        adapters=Adapters(rank=run.lora_rank) if run.lora_rank else None,
    )


def padded_vocab(vocab: int, multiple: int) -> int:
    """Return the rows of a vocabulary's matrix that are a multiple of a number."""
    return -(-vocab // multiple) * multiple


def plan_of(run: RunRow, model: Transformer, *, devices_per_node: int) -> Plan:
    """Return the layout of a row as a plan. Raises RowError where its numbers make none."""
    schedule, vpp = SCHEDULES[run.schedule], run.vpp
    microbatches = run.num_microbatches
    if schedule == "zb_v":
        vpp = 2  # down the ranks and up again
    # Interleaving needs whole rounds of pp microbatches (Narayanan et al. 2021, section 2.2.2),
    # unless its groups have sizes of their own.
    uneven = microbatches % run.pp and (not run.microbatch_group or microbatches < run.pp)
    if schedule == "interleaved_1f1b" and (vpp == 1 or uneven):
        schedule, vpp = "1f1b", 1
    if run.pp == 1:
        schedule, vpp = "1f1b", 1
    table: tuple[str, ...] = ()
    if schedule == "1f1b" and microbatches < run.pp:
        # With so few, the order of 1F1B is that of all forwards first.
        schedule, table = "fthenb", _all_forwards_first(run.pp, microbatches)
    num_stages = run.pp * vpp
    if model.encoder is not None and num_stages > 1:
        raise RowError(f"pp={run.pp} with encoder_layers is not priced; use pp=1")
    if run.stage_blocks and schedule == SCHEDULES[run.schedule]:
        bounds = [0, *accumulate(run.stage_blocks)]
    elif run.stack.balances_stages and num_stages > 1:
        bounds = _balanced_bounds(model, num_stages)
    elif num_stages == 1:
        bounds = [0, len(build_transformer(model).blocks)]
    else:
        bounds = _bounds(model.layers + model.ahead, num_stages)
    on_tp: tuple[ClassLayout, ...] = ()
    on_cp: tuple[ClassLayout, ...] = ()
    if run.tp > 1:
        on_tp = tp_layouts(
            model,
            sequence_parallel=run.sequence_parallel,
            microbatch_size=run.micro_batch,
            cuts_experts=run.etp > 1,
        )
    if run.cp > 1:
        on_cp = cp_layouts(
            model,
            tp=run.tp,
            sequence_parallel=run.sequence_parallel,
            microbatch_size=run.micro_batch,
            cuts_experts=run.etp > 1,
        )
    homes = stage_to_pp_rank(schedule, run.pp, vpp)
    return Plan(
        model=_model_ref(model),
        cluster=ClusterRef(name="row", device="gpu", devices_per_node=devices_per_node),
        degrees=Degrees(
            dp=run.dp,
            cp=run.cp,
            tp=run.tp,
            ep=run.ep,
            etp=run.etp if run.ep > 1 else 1,
        ),
        pp=run.pp,
        vpp=vpp,
        microbatch_size=run.micro_batch,
        num_microbatches=microbatches,
        schedule=schedule,
        table=table,
        zero_stage=_zero_stage(run.zero_stage),
        precision="bf16",
        stages=tuple(
            StagePlan(
                pp_rank=homes[s],
                first_block=bounds[s],
                last_block=bounds[s + 1] - 1,
                recompute="none" if run.recompute == "none" else "selective",
                recompute_blocks=_saved_whole(run, bounds[s], bounds[s + 1], blocks=bounds[-1]),
            )
            for s in range(run.pp * vpp)
        ),
        recomputed=recomputed_ops(model, run.recompute, run.stack.selective_by_op),
        layouts=(*on_tp, *on_cp),
    )


def _saved_whole(run: RunRow, first: int, end: int, *, blocks: int) -> tuple[BlocksRecompute, ...]:
    """Return the blocks of a stage that recompute nothing: its layers beyond `recompute_layers`."""
    # Neither the embedding nor the head is a layer.
    start = max(first, 1) + run.recompute_layers
    last = min(end, blocks - 1) - 1
    if not run.recompute_layers or run.recompute == "none" or start > last:
        return ()
    return (BlocksRecompute(first_block=start, last_block=last, recompute="none"),)


def _all_forwards_first(pp: int, microbatches: int) -> tuple[str, ...]:
    """Return the jobs of each rank where there are too few microbatches to fill a pipeline."""
    return tuple(
        " ".join(f"{rank}{kind}{i}" for kind in "FB" for i in range(microbatches))
        for rank in range(pp)
    )


def _zero_stage(stage: int) -> Literal[0, 1, 2, 3]:
    for known in (0, 1, 2, 3):
        if stage == known:
            return known
    raise RowError(f"zero_stage={stage} is not 0 to 3")


@lru_cache(maxsize=1024)
def recomputed_ops(model: Transformer, recompute: str, by_op: bool) -> tuple[ClassRecompute, ...]:
    """Return the ops of each class that a row's recomputation runs again: of layers only.

    `by_op`: as in `Execution.selective_by_op`, where the row names no modules.
    """
    if recompute == "none":
        return ()
    classes = build_transformer(model).classes
    again, discarded = (
        tuple(f".{part}" for part in parts) for parts in modules_recomputed(recompute)
    )
    chosen = []
    for index, program in enumerate(classes):
        # The first class is the embedding, the last the head.
        if not 0 < index < len(classes) - 1:
            ops: tuple[Op, ...] = ()
        elif recompute == "full":
            ops = program.ops
        elif by_op and recompute == "selective":
            products = [op.name for op in program.ops if is_product(op)]
            saved = {op.name for op in program.ops if is_attention(op)} | set(products[::2])
            ops = tuple(op for op in program.ops if op.name not in saved)
        else:
            views = _views_of(program, discarded)
            ops = tuple(
                op for op in program.ops if op.name in views or f".{op.module}".endswith(again)
            )
        chosen.append(ClassRecompute(class_index=index, ops=tuple(op.name for op in ops)))
    return tuple(chosen)


def _views_of(program: Program, modules: tuple[str, ...]) -> frozenset[str]:
    """Return the ops that give views of what these modules make: no memory of their own."""
    made: set[str] = set()
    views = set()
    for op in program.ops:
        is_view = family_of(op.target).moves_nothing and not made.isdisjoint(op.inputs)
        if is_view:
            views.add(op.name)
        if is_view or (modules and f".{op.module}".endswith(modules)):
            made.update(op.outputs)
    return frozenset(views)


def _balanced_bounds(model: Transformer, stages: int) -> list[int]:
    """First blocks of stages of about equal products, and the end.

    A stage ends with the block that takes it over its part of the whole, as nanotron's do.
    """
    width = model.head_width
    # Four products of attention and three of a gated feed-forward.
    layer = 4 * model.heads * width * model.hidden + 3 * model.hidden * model.ffn_hidden
    costs = [0, *[layer] * model.layers, model.vocab * model.hidden]
    whole, done = sum(costs), 0
    bounds = [0]
    for index, cost in enumerate(costs[:-1]):
        done += cost
        left = len(costs) - index - 1
        needed = stages - len(bounds)
        # As many blocks left as stages: each takes one from here on.
        if needed and (done >= whole * len(bounds) / stages or left == needed):
            bounds.append(index + 1)
    if len(bounds) < stages:
        # The head alone is more than its part: the stages before it are cut again.
        return _bounds(model.layers, stages)
    return [*bounds, len(costs)]


def _bounds(layers: int, stages: int) -> list[int]:
    """First blocks of stages, and the end; block 0 is the embedding, the last the head.

    Where layers do not divide, the first and the last stage hold fewer, as they also hold the
    embedding and the head.
    """
    if layers % stages == 0:
        sizes = [layers // stages] * stages
    else:
        # Whole stages inside; the layers that are missing then are taken off both ends.
        inner = ceil(layers / stages)
        missing = inner * stages - layers
        ends = [inner - missing // 2, inner - (missing - missing // 2)]
        if min(ends) >= 0 and stages > 1 and missing <= 2 * inner:
            sizes = [ends[0], *[inner] * (stages - 2), ends[1]]
        else:
            sizes = [layers * (s + 1) // stages - layers * s // stages for s in range(stages)]
    sizes[0] += 1
    sizes[-1] += 1
    if min(sizes) < 1:
        raise RowError(f"{layers} layers do not make {stages} stages")
    return [0, *accumulate(sizes)]


@lru_cache(maxsize=512)
def _model_ref(model: Transformer) -> ModelRef:
    digest = hashlib.sha256(repr(model).encode()).hexdigest()
    graph = build_transformer(model)
    return ModelRef(
        name=graph.name,
        file="",
        fingerprint=digest,
        inputs=batch_spec(graph),
        batch_tree=graph.batch_tree,
    )


def is_nearly_full(found: Estimate, run: RunRow, room_bytes: float) -> bool:
    """Whether an allocator would reserve more for a row than a device has: what it usually loses,
    or as much as runs tell (`reserved_factor`).

    A block that a collective on another stream used is free only when that has ended, so others are
    reserved meanwhile. Collectives of tp and ZeRO's gathers take such blocks; sums without ZeRO go
    through buckets of their own.
    """
    if not run.stack.reserved_factor or (run.tp == 1 and not run.zero_stage):
        return found.peak_bytes > room_bytes
    reserved = max(
        run.stack.reserved_factor * m.tensor_bytes + m.context_bytes for m in found.memory
    )
    return bool(reserved > room_bytes)


def needed_bytes(found: Estimate) -> float:
    """Return what a row needs of its device at least: live tensors and the context.

    Between that and what an allocator reserves lies a band in which some ran and others crashed:
    `is_nearly_full` is its verdict.
    """
    return max(float(parts.tensor_bytes + parts.context_bytes) for parts in found.memory)


def retry_seconds(found: Estimate, run: RunRow, room_bytes: float) -> float:
    """Return what a step takes longer where memory is nearly full.

    (m + p - 1) turns of as many messages as a rank takes part in: there and back on each side that
    has a neighbour, `retry_s` each.
    """
    if run.pp == 1 or not is_nearly_full(found, run, room_bytes):
        return 0.0
    messages = 2 if run.pp == 2 else 4
    return run.stack.retry_s * messages * (run.num_microbatches + run.pp - 1)


class RowPrices:
    """Prices rows: block prices that rows share are made once. Mutable.

    Rows of a table are grouped by model, so the prices of the latest few models are enough.
    """

    def __init__(self, *, kept_models: int = KEPT_MODELS) -> None:
        self._kept_models = kept_models
        self._costs: OrderedDict[tuple, CostCache] = OrderedDict()

    def estimate(self, run: RunRow, profile: Profile, rates: DeviceRates) -> Estimate:
        """Return the step of a row on a machine, in time and memory."""
        plan, costs = self.plan(run, profile, rates)
        return estimate(costs.graph, costs.profile, plan, costs=costs)

    def step_seconds(
        self, run: RunRow, profile: Profile, rates: DeviceRates, *, room_bytes: float
    ) -> float:
        """Return the step of a row on a device with so much memory."""
        if not run.stack.retry_s:
            return step_seconds(*self.plan(run, profile, rates))
        found = self.estimate(run, profile, rates)
        return found.step_s + retry_seconds(found, run, room_bytes)

    def plan(self, run: RunRow, profile: Profile, rates: DeviceRates) -> tuple[Plan, CostCache]:
        """Return the plan of a row, and the prices of its model's blocks."""
        model = transformer_of(run)
        plan = plan_of(run, model, devices_per_node=profile.cluster.devices_per_node)
        nodes = ceil(run.gpus / profile.cluster.devices_per_node)
        # A cache holds its profile and rates, so no other objects have their ids while it is kept.
        key = model, id(profile), id(rates), nodes, run.stack, run.dtype
        if key not in self._costs:
            executed = ExecutedProfile(
                profile, rates, num_nodes=nodes, execution=run.stack, product_dtype=run.dtype
            )
            graph = build_transformer(model)
            self._costs[key] = CostCache(graph, executed, execution=run.stack)
            if len(self._costs) > self._kept_models:
                self._costs.popitem(last=False)
        self._costs.move_to_end(key)
        return plan, self._costs[key]

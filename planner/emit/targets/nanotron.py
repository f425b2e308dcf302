"""nanotron: the sections of its YAML configuration that a plan decides.

nanotron cuts stages itself, by the products of layers and head; a plan that is cut otherwise is
refused. Source, huggingface/nanotron at 2411b022a75f (2026-04-07): src/nanotron/config/config.py
(TokensArgs, OptimizerArgs, ModelArgs), config/parallelism_config.py (ParallelismArgs),
models/base.py (build_model) and models/qwen.py (get_block_compute_costs), parallel/context.py (rank
order), parallel/pipeline_parallel/engine.py.
"""

from __future__ import annotations

from itertools import accumulate

from planner.emit.emitter import Emitted, Emitter, Rule, register_emitter
from planner.emit.start import headline
from planner.emit.view import PlanView
from planner.schedule import build_schedule

ENGINES = {"1f1b": "1f1b", "fthenb": "afab"}
"""nanotron's pipeline engines, by the schedule whose job table each has."""


def own_cuts(view: PlanView) -> list[int]:
    """Return the pp rank of each layer, and then of the head, as nanotron places them.

    A rank is left once the products up to its last block are more than its part of the whole:
    4 heads d h + 3 f h of a layer and V h of the head (d: width of a head, h: hidden, f: feed-
    forward, V: vocabulary).
    """
    sizes, pp = view.sizes, view.plan.pp
    assert sizes is not None
    width = sizes.hidden // sizes.heads
    layer = 4 * sizes.heads * width * sizes.hidden + 3 * sizes.ffn_hidden * sizes.hidden
    done = list(accumulate([*[layer] * sizes.layers, sizes.vocab * sizes.hidden]))
    rank, places = 0, []
    for cost in done:
        places.append(rank)
        if cost > done[-1] * (rank + 1) / pp:
            rank += 1
    return places


def _why_not_cuts(view: PlanView) -> str:
    view.model("the cuts of the plan")
    sizes = view.sizes
    if sizes is None or not (sizes.heads and sizes.ffn_hidden and sizes.vocab):
        return "nanotron cuts by sizes that the model's graph does not tell"
    own = own_cuts(view)
    planned = [s for s, part in enumerate(view.parts) for _ in part.layers]
    planned.append(next(s for s, part in enumerate(view.parts) if part.head))
    if view.parts[0].embedding and own == planned:
        return ""
    counts = ",".join(str(own[:-1].count(rank)) for rank in range(view.plan.pp))
    return f"nanotron cuts stages of {counts} layers, and can't be told otherwise"


def _engine(view: PlanView) -> str:
    plan = view.plan
    for name, engine in ENGINES.items():
        table = build_schedule(name, pp=plan.pp, vpp=1, num_microbatches=plan.num_microbatches)
        if table.jobs == view.schedule.jobs:
            return engine
    return ""


def _why_not_schedule(view: PlanView) -> str:
    if view.plan.vpp == 1 and not _engine(view):
        return f"nanotron has the job tables of {' and '.join(ENGINES)}"
    return ""


def _why_not_zero(view: PlanView) -> str:
    return "nanotron has ZeRO 0 and 1" if view.plan.zero_stage > 1 else ""


def _why_not_recompute(view: PlanView) -> str:
    return "" if set(view.recomputed) == {"full"} else "nanotron recomputes all layers, or none"


def _why_not_precision(view: PlanView) -> str:
    if view.plan.precision == "bf16" or view.trained_dtype == "float32":
        return ""
    return f"nanotron sums gradients of {view.trained_dtype} in fp32 (`precision` bf16)"


def _why_not_cp(view: PlanView) -> str:
    return (
        "" if view.cp_kind() == "gathered" else "nanotron passes keys and values between cp ranks"
    )


def _write(view: PlanView) -> Emitted:
    plan = view.plan
    sections: dict[str, dict[str, object]] = {
        "parallelism": {
            "dp": plan.dp,
            "pp": plan.pp,
            "tp": plan.tp,
            "context_parallel_size": plan.cp,
            "expert_parallel_size": 1,
            "pp_engine": _engine(view) if plan.pp > 1 else "1f1b",
            "tp_mode": "REDUCE_SCATTER" if view.sequence_parallel else "ALL_REDUCE",
            "recompute_layer": str("full" in view.recomputed).lower(),
        },
        "tokens": {
            "micro_batch_size": plan.microbatch_size,
            "batch_accumulation_per_replica": plan.num_microbatches,
            "sequence_length": view.seq_len,
        },
        "model": {"dtype": view.trained_dtype},
        "optimizer": {
            "zero_stage": plan.zero_stage,
            "accumulate_grad_in_fp32": str(plan.precision == "bf16").lower(),
        },
    }
    lines = headline(view, "Sections of a nanotron configuration")
    for section, values in sections.items():
        lines += [f"{section}:", *(f"  {name}: {value}" for name, value in values.items())]
    return Emitted(
        files={"nanotron.yaml": "\n".join(lines) + "\n"},
        notes=("put these values into your nanotron configuration; the rest of it is yours",),
    )


register_emitter(
    Emitter(
        name="nanotron",
        summary="sections of nanotron's YAML configuration",
        expresses={
            "dp": "parallelism.dp",
            "tp": "parallelism.tp",
            "cp": Rule(how="parallelism.context_parallel_size", unless=_why_not_cp),
            "pp": "parallelism.pp",
            "microbatches": "tokens.micro_batch_size, tokens.batch_accumulation_per_replica",
            "cuts": Rule(
                how="its own", unless=_why_not_cuts, instead="the stages that it cuts itself"
            ),
            "schedule": Rule(how="parallelism.pp_engine", unless=_why_not_schedule),
            "zero": Rule(how="optimizer.zero_stage", unless=_why_not_zero),
            "precision": Rule(how="model.dtype", unless=_why_not_precision),
            "recompute": Rule(how="parallelism.recompute_layer", unless=_why_not_recompute),
            "layouts": Rule(
                how="its own, parallelism.tp_mode",
                unless=PlanView.differs_from_usual_tp,
                instead="its own placements",
            ),
        },
        write=_write,
        executions=("nanotron",),
    )
)

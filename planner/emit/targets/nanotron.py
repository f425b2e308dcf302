"""nanotron: the sections of its YAML configuration that a plan decides.

nanotron cuts stages itself, by the products of layers and head; a plan that is cut otherwise is
refused. Source, huggingface/nanotron at 2411b022a75f (2026-04-07): src/nanotron/config/config.py
(TokensArgs, OptimizerArgs, ModelArgs), config/parallelism_config.py (ParallelismArgs),
models/base.py (build_model) and models/qwen.py (get_block_compute_costs), parallel/context.py (rank
order), parallel/pipeline_parallel/engine.py.
"""

from __future__ import annotations

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import headline
from planner.emit.view import PlanView
from planner.language.plan import low_dtype
from planner.language.schedule import build_schedule
from planner.language.stacks.known import NANOTRON

ENGINES = {"1f1b": "1f1b", "fthenb": "afab"}
"""nanotron's pipeline engines, by the schedule whose job table each has."""


def _engine(view: PlanView) -> str:
    plan = view.plan
    for name, engine in ENGINES.items():
        table = build_schedule(name, pp=plan.pp, vpp=1, num_microbatches=plan.num_microbatches)
        if table.jobs == view.schedule.jobs:
            return engine
    return ""


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
            "accumulate_grad_in_fp32": str(bool(low_dtype(plan.precision))).lower(),
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
        expresses=expresses(
            NANOTRON,
            {
                "dp": "parallelism.dp",
                "tp": "parallelism.tp",
                "cp": "parallelism.context_parallel_size",
                "pp": "parallelism.pp",
                "microbatches": "tokens.micro_batch_size, tokens.batch_accumulation_per_replica",
                "cuts": "its own",
                "schedule": "parallelism.pp_engine",
                "zero": "optimizer.zero_stage",
                "precision": "model.dtype",
                "recompute": "parallelism.recompute_layer",
                "layouts": "its own, parallelism.tp_mode",
            },
            {"cuts": "the stages that it cuts itself", "layouts": "its own placements"},
        ),
        write=_write,
        executions=NANOTRON.executions,
    )
)

"""torchtitan: a configuration in Python, its pipeline schedule as CSV, and a script for a node.

The plan's own job table and cuts are kept: the schedule is written in the format of
`torch.distributed.pipelining` (jobs alone; sends and receives are added when it is loaded), and
each stage's modules are named. Sources: pytorch/torchtitan at b5bcd76c66d0 (2026-08-21),
torchtitan/config/configs.py (ParallelismConfig, TrainingConfig), torchtitan/config/README.md (a run
is a function that returns a Trainer.Config), torchtitan/distributed/pipeline_parallel.py (names of
modules, csv), activation_checkpoint.py, fsdp.py; its release v0.2.2 at 73a0e6979dd1,
torchtitan/config/job_config.py, for configurations in toml; of both
torchtitan/components/quantization/float8.py and utils.py (what is converted, and what names leave
out), of the first also mx.py (what names convert).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import NODE_SETTINGS, headline, torchrun_lines
from planner.emit.view import PlanView
from planner.language.plan.parts import low_dtype, scaling_named
from planner.language.schedule import Schedule
from planner.language.schedule.placements import loop_placement
from planner.language.stacks.known import TORCHTITAN, TORCHTITAN_TOML
from planner.language.stacks.narrow_layers import (
    experts_are_narrow,
    narrow_layers,
    wide_layers,
)

CSV_FILE = "schedule.csv"


def schedule_csv(schedule: Schedule) -> str:
    """Return a job table as `_PipelineScheduleRuntime._load_csv` reads it: a row a pp rank."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.jobs)


def module_names(view: PlanView, *, head: str) -> list[list[str]]:
    """Return the names of each stage's modules; `head` is what the last projection is called."""
    return [
        ["tok_embeddings"] * part.embedding
        + [f"layers.{layer}" for layer in part.layers]
        + ["norm", head] * part.head
        for part in view.parts
    ]


def parallelism(view: PlanView, *, head: str) -> dict[str, Any]:
    """Return the fields of torchtitan's section of that name that both of its forms have."""
    plan = view.plan
    sharded = plan.zero_stage > 0
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.degrees["rp"] * (1 if sharded else plan.dp),
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        # ZeRO 3 frees gathered parameters behind each forward; ZeRO 2 keeps them for the backward.
        "fsdp_reshard_after_forward": "never" if plan.zero_stage == 2 else "always",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.degrees["ep"],
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.pp > 1:
        is_loop = plan.stage_to_pp_rank == loop_placement(plan.pp, plan.vpp)
        fields |= {
            # With a csv, the name tells only which stages a rank holds.
            "pipeline_parallel_schedule": (
                "ZBVZeroBubble" if not is_loop else "1F1B" if plan.vpp == 1 else "Interleaved1F1B"
            ),
            "module_fqns_per_model_part": module_names(view, head=head),
        }
    return fields


def training(view: PlanView) -> dict[str, Any]:
    """Return the dtypes of torchtitan's section of that name."""
    if low_dtype(view.plan.precision) == "bfloat16":
        return {"dtype": "float32", "mixed_precision_param": "bfloat16"}
    return {"dtype": view.trained_dtype, "mixed_precision_param": view.trained_dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """What torchtitan multiplies in 8 bits."""

    recipe: str
    """Of torchao, for linear layers; empty where none is in 8 bits."""
    left_out: tuple[str, ...] = ()
    """Parts of names whose linear layers stay in 16 bits."""
    converted: tuple[str, ...] = ()
    """Parts of names whose linear layers are in 8 bits, where these are told."""
    experts: bool = False
    """Whether experts are in 8 bits, too: torchao scales the rows of their factors."""


def narrow_of(view: PlanView, *, head: str) -> Narrow:
    """Return what is in 8 bits of a plan; `head` is what the last projection is called."""
    recipe = scaling_named(view.plan.precision)
    if not recipe:
        return Narrow(recipe="")
    if view.plan.precision in TORCHTITAN.converts_named:
        named = narrow_layers(view.widths_of_layers)
        return Narrow(recipe=recipe, converted=tuple(f"layers.{layer}." for layer in named))
    router = ("router.gate",) if view.has_experts else ()
    layers = tuple(f"layers.{layer}." for layer in wide_layers(view.widths_of_layers))
    return Narrow(
        recipe=recipe,
        left_out=(head, *router, *layers),
        experts=experts_are_narrow(view.widths_of_layers),
    )


def checkpointing(view: PlanView) -> str:
    """Return the kind of activation checkpointing: none, full or selective."""
    if "recompute" in view.accepted:
        return "selective"
    return "full" if view.recomputed[0] == "full" else "none"


WORDS = {
    "rp": "data_parallel_replicate_degree",
    "dp": "data_parallel_replicate_degree, data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "microbatches": "num_pp_microbatches, num_tokens_per_microbatch_per_dp_rank",
    "pp": "pipeline_parallel_degree",
    "vpp": "the number of module_fqns_per_model_part",
    "cuts": "module_fqns_per_model_part",
    "stage-placement": "the style of its schedule",
    "schedule": "pipeline_parallel_schedule_csv, job for job",
    "zero": "0, 2 and 3: fsdp_reshard_after_forward",
    "precision": "dtype, mixed_precision_param; fp8: Float8LinearConverter, of experts "
    "Float8GroupedExpertsConverter; mxfp8: MXFP8LinearConverter",
    "recompute": "FullAC",
    "layouts": "its own, enable_sequence_parallel",
}
INSTEAD = {"recompute": "SelectiveAC", "layouts": "its own placements"}


def _write(view: PlanView) -> Emitted:
    plan = view.plan
    fields = parallelism(view, head="lm_head") | {
        "enable_sequence_parallel": view.sequence_parallel,
        "num_pp_microbatches": plan.num_microbatches if plan.pp > 1 else 1,
    }
    tokens = training(view) | {
        "num_tokens_per_microbatch_per_dp_rank": plan.microbatch_size * view.seq_len,
        "num_tokens_per_train_step": plan.global_batch * view.seq_len,
        "max_context_length": view.seq_len,
    }
    if plan.pp > 1 or plan.degrees["ep"] > 1:
        tokens["disable_cuda_graphs"] = True  # torchtitan refuses them with either
    recompute = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
    kind = checkpointing(view)
    lines = headline(view, "A torchtitan configuration")
    if view.graph is not None:
        lines.append(f"# The model it is for has {view.num_layers} layers.")
    lines += ["from dataclasses import replace", "from pathlib import Path", ""]
    lines += ["from torchtitan.config import ParallelismConfig"]
    if kind != "none":
        policy = recompute[kind].partition(".")[0]
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    narrow = narrow_of(view, head="lm_head")
    lines[-1:-1] = _converters_import(narrow)
    lines += [
        "",
        "# Your model's own configuration: its sizes, data, optimizer.",
        "from torchtitan.models.llama3.config_registry import llama3_8b as base",
        "",
        "",
        "def planned():",
        "    config = base()",
        "    config.parallelism = ParallelismConfig(",
    ]
    lines += [f"        {name}={value!r}," for name, value in _one_a_stage(fields)]
    files = {}
    if plan.pp > 1:
        files[CSV_FILE] = schedule_csv(view.schedule)
        csv_path = f'str(Path(__file__).with_name("{CSV_FILE}"))'
        lines.append(f"        pipeline_parallel_schedule_csv={csv_path},")
    else:
        lines.remove("from pathlib import Path")
    lines += ["    )", "    config.training = replace(", "        config.training,"]
    lines += [f"        {name}={value!r}," for name, value in tokens.items()]
    lines += [
        "    )",
        f"    config.activation_checkpoint = {recompute[kind]}",
    ]
    if plan.execution in TORCHTITAN.executions:
        is_compiled = plan.execution != TORCHTITAN.executions[0]
        lines.append(f"    config.compile = replace(config.compile, enable={is_compiled})")
    lines += [*_converted(narrow), "    return config"]
    start = ["#!/usr/bin/env bash", *headline(view, "A node of torchtitan"), "set -euo pipefail"]
    start += [*NODE_SETTINGS, 'export PYTHONPATH="$(cd "$(dirname "$0")" && pwd):${PYTHONPATH:-}"']
    start += torchrun_lines(view, '-m torchtitan.train --module planned --config planned "$@"')
    main = {"planned.py": "\n".join(lines) + "\n", "torchtitan.sh": "\n".join(start) + "\n"}
    return Emitted(
        files=main | files,
        notes=(
            "planned.py derives from llama3_8b: import your model's own configuration as `base`",
        ),
    )


LINEAR, EXPERTS = "Float8LinearConverter", "Float8GroupedExpertsConverter"
NAMED_LINEAR = "MXFP8LinearConverter"
"""Of linear layers whose names have one of some parts; it has one recipe, of blocks."""


def _converters_import(narrow: Narrow) -> list[str]:
    if not narrow.recipe:
        return []
    linear = NAMED_LINEAR if narrow.converted else LINEAR
    names = f"{EXPERTS}, {linear}" if narrow.experts else linear
    return [f"from torchtitan.components.quantization import {names}"]


def _converted(narrow: Narrow) -> list[str]:
    """Return lines that put products in 8 bits into the model's configuration."""
    if not narrow.recipe:
        return []
    name, parts = LINEAR, [("recipe_name", narrow.recipe), ("filter_fqns", list(narrow.left_out))]
    if narrow.converted:
        name, parts = NAMED_LINEAR, [("fqns", list(narrow.converted))]
    lines = ['    compiles = config.compile.enable and "model" in config.compile.components']
    lines += ["    converters = [", f"        {name}.Config("]
    lines += [f"            {name}={value!r}," for name, value in parts]
    lines += ["            model_compile_enabled=compiles,", "        ),"]
    if narrow.experts:
        lines.append(f"        {EXPERTS}.Config(model_compile_enabled=compiles),")
    return [
        *lines,
        "    ]",
        "    model = config.model_spec.model",
        "    for converter in converters:",
        "        model = converter.build().convert(model)",
        "    config.model_spec = replace(config.model_spec, model=model)",
    ]


class _Stages(list):
    """Names of modules, printed a stage a line."""

    def __repr__(self) -> str:
        return "[\n" + "".join(f"            {stage!r},\n" for stage in self) + "        ]"


def _one_a_stage(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, _Stages(value) if name == "module_fqns_per_model_part" else value)
        for name, value in fields.items()
    ]


def _write_toml(view: PlanView) -> Emitted:
    plan = view.plan
    fields = parallelism(view, head="output")
    if plan.cp > 1:
        is_ring = view.cp_kind() == "ring"
        fields["context_parallel_rotate_method"] = "alltoall" if is_ring else "allgather"
    if plan.degrees["ep"] > 1:
        fields["expert_tensor_parallel_degree"] = plan.degrees["etp"]
    files = {}
    if plan.pp > 1:
        files[CSV_FILE] = schedule_csv(view.schedule)
        fields |= {
            "pipeline_parallel_schedule_csv": CSV_FILE,
            "pipeline_parallel_microbatch_size": plan.microbatch_size,
        }
    sections = {
        # With a pipeline, a local batch is cut into microbatches; else batches are accumulated.
        "training": {
            "local_batch_size": plan.microbatch_size
            * (plan.num_microbatches if plan.pp > 1 else 1),
            "global_batch_size": plan.global_batch,
            "seq_len": view.seq_len,
            **training(view),
        },
        "parallelism": fields,
        "activation_checkpoint": {"mode": checkpointing(view)},
    }
    if plan.execution in TORCHTITAN.executions:
        sections["compile"] = {"enable": plan.execution != TORCHTITAN.executions[0]}
    sections |= _narrow_sections(narrow_of(view, head="output"))
    lines = headline(view, "Sections of a torchtitan v0.2 configuration")
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    return Emitted(
        files={"torchtitan.toml": "\n".join(lines) + "\n"} | files,
        notes=(
            f"put these sections into your model's toml, and start it where {CSV_FILE} lies"
            if plan.pp > 1
            else "put these sections into your model's toml",
        ),
    )


TOML_LINEAR = "quantize.linear.float8"
"""The converter of linear layers, and its section."""


def _narrow_sections(narrow: Narrow) -> dict[str, dict[str, Any]]:
    if not narrow.recipe:
        return {}
    linear = {"recipe_name": narrow.recipe, "filter_fqns": list(narrow.left_out)}
    return {"model": {"converters": [TOML_LINEAR]}, TOML_LINEAR: linear}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if value and isinstance(value, list) and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


_CURRENT = register_emitter(
    Emitter(
        name="torchtitan",
        summary="a torchtitan configuration in Python, its schedule as CSV, a script for a node",
        expresses=expresses(TORCHTITAN, WORDS, INSTEAD),
        write=_write,
        executions=TORCHTITAN.executions,
    )
)

register_emitter(
    replace(
        _CURRENT,
        name="torchtitan-toml",
        summary="sections of a torchtitan v0.2 toml file, and its schedule as CSV",
        expresses=expresses(
            TORCHTITAN_TOML,
            WORDS
            | {
                "dp": "data_parallel_shard_degree",
                "etp": "expert_tensor_parallel_degree",
                "layouts": "its own, always with sequence parallelism",
                "precision": "dtype, mixed_precision_param; fp8, fp8-tensorwise: converters, "
                "[quantize.linear.float8]",
            },
            INSTEAD,
        ),
        write=_write_toml,
    )
)

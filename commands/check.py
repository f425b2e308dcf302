"""`planner check`: a hand-written line of Megatron-style flags, held to all rules and priced."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.common.options import JsonOption
from commands.render.console import begin_stage, show_json, show_note
from planner.errors import PlannerError


def check(
    flags: Annotated[str, typer.Argument(help="The flags in quotes, or a file that has them.")],
    gpus: Annotated[int, typer.Option(help="Devices of the run.")],
    model: Annotated[
        str,
        typer.Option(
            help="A well-known model (llama-3-8b), a model file, or sizes: layers=32,hidden=4096."
        ),
    ] = "",
    gpu: Annotated[str, typer.Option(help="The device that is priced.")] = "H100",
    expert_imbalance: Annotated[
        float | None,
        typer.Option(help="How uneven experts' rows are: sigma of log rows a rank, 0 is even."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check Megatron-style flags by every rule; price them.

    Example: planner check '--num-layers 30 --pipeline-model-parallel-size 2' --gpus 16
    """
    from planner.emit.megatron_options import parse_flags
    from planner.emit.megatron_refusals import refusals
    from planner.emit.megatron_row import OPTION_OF, notes_of, row_of
    from planner.emit.megatron_rules import Run, broken_rules

    if gpus < 1:
        raise PlannerError(f"--gpus {gpus} was given; use 1 or more")
    columns = _columns_of(model)
    sizes = {OPTION_OF[name]: size for name, size in columns.items() if name in OPTION_OF}
    run = Run(flags=parse_flags(_text_of(flags)), num_devices=gpus, model=sizes)
    # What Megatron-LM itself would refuse comes first: what is not priced may change with it.
    broken = broken_rules(run) or refusals(run)
    for rule in broken:
        print(f"planner: {rule}", file=sys.stderr)
    if broken:
        return 2
    notes = notes_of(run)
    if run.flags.unknown:
        unknown = ", ".join(f"--{name}" for name in dict.fromkeys(run.flags.unknown))
        notes.append(f"not of Megatron-LM's options, of no part in the price: {unknown}")
    row = row_of(run, columns, model, gpu)
    if expert_imbalance is not None:
        row["expert_imbalance"] = expert_imbalance
    _show_price(row, notes, as_json=as_json)
    return 0


def _text_of(flags: str) -> str:
    """Return the flags themselves, of a file if that is what was named."""
    if flags.lstrip().startswith("-") or len(flags) > 255:
        return flags
    path = Path(flags)
    try:
        return path.read_text() if path.is_file() else flags
    except (OSError, ValueError) as error:
        raise PlannerError(f"{flags} is not readable ({error}); give a text of flags") from None


def _columns_of(model: str) -> dict[str, int]:
    """Return the sizes that are known of a model, by column of a row."""
    if not model:
        return {}
    if model.endswith(".py"):
        return _columns_of_file(Path(model))
    if "=" in model:
        return dict(_size(text) for text in model.split(","))
    from costmodel.table.rows.named_models import NAMED, named_model
    from planner.emit.megatron_row import OPTION_OF

    known = named_model(model)
    if known is None:
        raise PlannerError(
            f"--model {model} is none of the {len(NAMED)} models whose sizes are known; give a "
            "model file, or sizes: layers=32,hidden=4096,heads=32"
        )
    columns = {name: getattr(known, name) for name in OPTION_OF if hasattr(known, name)}
    if known.num_experts == 1:
        del columns["num_experts"], columns["experts_per_token"]
    return columns | {"gated_ffn": known.gated_ffn}


def _size(text: str) -> tuple[str, int]:
    from planner.emit.megatron_row import OPTION_OF

    name, _, number = (part.strip() for part in text.partition("="))
    if name not in (*OPTION_OF, "gated_ffn") or not number.isdecimal():
        raise PlannerError(
            f"--model {text!r} is no size; write NAME=NUMBER with a name of "
            f"{', '.join((*OPTION_OF, 'gated_ffn'))}"
        )
    return name, int(number)


def _columns_of_file(path: Path) -> dict[str, int]:
    from commands.common.inputs import graph_of
    from planner.language.stacks.transformer_graph import sizes_of

    begin_stage("reading the model")
    sizes = sizes_of(graph_of(path))
    columns = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "ffn_hidden": sizes.ffn_hidden,
        "gated_ffn": int(sizes.gated),
        "vocab": sizes.vocab,
        "seq_len": sizes.seq_len,
    }
    return {name: size for name, size in columns.items() if size}


MAY_CHANGE = {
    "network": "the time of messages between nodes",
    "vocab": "the embedding, the output matrix and the logits",
    "seq_len": "time and memory of all layers",
    "heads": "attention's time and memory",
    "kv_heads": "attention's time and memory",
    "gated_ffn": "feed-forwards' time and memory",
    "ffn_hidden": "feed-forwards' time and memory",
    "experts_per_token": "experts' time and memory",
    "micro_batch": "time and memory of all layers",
}
"""What of a price may change with a column that was filled in."""


def _assumption(text: str) -> str:
    """Return the line for a column that was filled in, with what it may change."""
    changed = MAY_CHANGE.get(text.partition("=")[0])
    return f"assumed: {text}" + (f", which may change {changed}" if changed else "")


def _show_price(row: dict[str, Any], notes: list[str], *, as_json: bool) -> None:
    from commands.render.plans.parts import memory_range
    from commands.render.plans.words import experts_words
    from costmodel.table.rows.rows import device_bytes, price_row
    from costmodel.uncertainty import memory_interval, row_interval
    from planner.units import GIB, format_bytes, format_seconds

    begin_stage("pricing the flags")
    texts = {name: str(value) for name, value in row.items()}
    priced = price_row(texts)
    predicted, profile = priced.predicted, priced.profile
    fullest = max(priced.estimate.memory, key=lambda parts: parts.total)
    held = memory_interval(fullest, profile, priced.run.stack)
    limit = device_bytes(texts, profile)
    step_s = predicted["predicted_step_time_s"]
    interval = row_interval(step_s, profile)
    notes = [*map(_assumption, filter(None, predicted["assumed"].split("; "))), *notes]
    experts = priced.estimate.experts
    if as_json:
        show_json(
            {
                "step_s": step_s,
                "interval": asdict(interval),
                "peak_bytes": int(fullest.total),
                "peak_tensor_bytes": round(predicted["predicted_peak_mem_gib"] * GIB),
                "memory_interval": asdict(held),
                "limit_bytes": round(limit),
                "fits": predicted["predicted_fits"],
                "tokens_per_s_per_device": predicted["predicted_tokens_per_s_per_gpu"],
                "notes": notes,
                "row": row,
                **({"experts": experts.to_dict()} if experts is not None else {}),
            }
        )
        return
    print("no rule is broken")
    print(
        f"step time  {format_seconds(step_s)}, {format_seconds(interval.low_s)} to "
        f"{format_seconds(interval.high_s)} in 4 of 5 cases, from {interval.basis}"
    )
    print(
        f"memory     {format_bytes(int(fullest.total))} of {format_bytes(limit)} on the fullest "
        f"device"
    )
    print(f"           {memory_range(**asdict(held))}")
    live = format_bytes(predicted["predicted_peak_mem_gib"] * GIB)
    print(f"           {live} of it live tensors; fits: {predicted['predicted_fits']}")
    if experts is not None:
        print(f"experts    {experts_words(experts.to_dict())}")
    print(f"tokens     {predicted['predicted_tokens_per_s_per_gpu']:,.0f} a second and device")
    for note in notes:
        show_note(note)

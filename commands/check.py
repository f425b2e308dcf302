"""`planner check`: a hand-written line of Megatron-style flags, held to all rules and priced; and
configurations of other systems, priced.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.options import JsonOption
from commands.render.console import begin_stage, show_json, show_note
from planner.errors import PlannerError

if TYPE_CHECKING:
    from profiles import Profile


def check(
    flags: Annotated[
        str,
        typer.Argument(
            help="The flags in quotes, or a file that has them; or a torchtitan .toml, a "
            "nanotron .yaml, or a .toml of columns."
        ),
    ],
    gpus: Annotated[int, typer.Option(help="Devices of the run.")],
    model: Annotated[
        str,
        typer.Option(
            help="A well-known model (llama-3-8b), a model file, or sizes: layers=32,hidden=4096."
        ),
    ] = "",
    gpu: Annotated[
        str | None,
        typer.Option(help="The device that is priced. Default: the profile's, else H100."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="A profile of that device, such as one made by `planner calibrate`."),
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(help="How uneven experts' rows are: sigma of log rows a rank, 0 is even."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check Megatron-style flags by every rule; price them.

    Example: planner check '--num-layers 30 --pipeline-model-parallel-size 2' --gpus 16
    """
    from commands.doors.runs import describe, is_configuration
    from commands.doors.runs.megatron import broken_in, described, text_of
    from profiles import load_profile

    if gpus < 1:
        raise PlannerError(f"--gpus {gpus} was given; use 1 or more")
    machine = None if profile is None else load_profile(profile)
    gpu = gpu or (USUAL_GPU if machine is None else machine.name.partition("@")[0])
    known = {"gpus": gpus, "gpu": gpu, **({"model": model} if model else {})}
    path = Path(flags) if len(flags) <= LONGEST_NAME else None
    if path is not None and path.suffix in OTHER_FILES and is_configuration(path):
        run = describe([path], asked=known)
    else:
        text = text_of(flags)
        # What Megatron-LM itself would refuse comes first.
        broken = broken_in(text, gpus, model)
        for rule in broken:
            print(f"planner: {rule}", file=sys.stderr)
        if broken:
            return 2
        run = described(text, gpus, model, gpu)
    row = run.row
    if expert_imbalance is not None:
        row["expert_imbalance"] = expert_imbalance
    _show_price(row, list(run.notes), machine, as_json=as_json)
    return 0


USUAL_GPU = "H100"
MEGATRON = ("megatron-core", "megatron-local")
"""Stacks whose flags were held to rules."""

LONGEST_NAME = 255
"""Letters of a file's name; what is longer is flags."""

OTHER_FILES = (".toml", ".yaml", ".yml", ".json")
"""Endings of configurations of other systems."""


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


def _show_price(
    row: dict[str, Any], notes: list[str], machine: Profile | None, *, as_json: bool
) -> None:
    from commands.render.plans.parts import memory_range
    from commands.render.plans.words import experts_words
    from commands.render.profile import factors_words
    from costmodel.runtime_calibration import row_interval_of, told_runs
    from costmodel.table.rows.row_plan import RowPrices
    from costmodel.table.rows.rows import device_bytes, price_row
    from costmodel.uncertainty import memory_interval, row_interval
    from planner.units import GIB, format_bytes, format_seconds

    begin_stage("pricing the flags")
    texts = {name: str(value) for name, value in row.items()}
    prices = RowPrices()
    priced = price_row(texts, prices, machine)
    predicted, profile = priced.predicted, priced.profile
    fullest = max(priced.estimate.memory, key=lambda parts: parts.total)
    held = memory_interval(fullest, profile, priced.run.stack)
    limit = device_bytes(texts, profile)
    step_s = predicted["predicted_step_time_s"]
    interval = row_interval_of(priced, prices) or row_interval(step_s, profile)
    known = profile.calibration_of(priced.run.stack.name)
    if known is not None:
        notes.append(f"calibrated by {told_runs(known)}: {factors_words(known)}")
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
    if row["stack"] in MEGATRON:
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

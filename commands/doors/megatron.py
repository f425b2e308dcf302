"""A Megatron-LM script, or a text of its flags: the decoder that they describe, and the run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands.doors.decoder_file import decoder_file
from commands.doors.opened import (
    Asked,
    Opened,
    name_of,
    read_text,
    refuse_other_length,
    refuse_task,
)
from planner.emit.targets.megatron_lm import RECIPES
from planner.errors import ModelError, PlannerError
from planner.language.plan.parts import scaling_named
from planner.language.stacks.known import MEGATRON_LM

VOCABULARY_MULTIPLE = 128
"""What Megatron-LM pads a vocabulary to a multiple of (--make-vocab-size-divisible-by), times tp,
which is searched here."""

USUAL_CLIP = 1.0
"""Megatron-LM's --clip-grad where nothing is given; 0 clips nothing."""


def read(path: Path, asked: Asked) -> Opened:
    """Return the model and the run of a script.

    Raises PlannerError, in one line, for flags that are broken, for parts of a model that nothing
    here is written for, and where sizes are missing.
    """
    refuse_task(path, asked)
    try:
        return _read(path, asked)
    except PlannerError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _read(path: Path, asked: Asked) -> Opened:
    from costmodel.table.rows.row_plan import padded_vocab
    from costmodel.table.rows.row_sizes import sizes_of_row
    from costmodel.table.rows.row_stack import stack_of_row
    from costmodel.table.rows.row_words import Cells
    from planner.emit.megatron_options import parse_flags
    from planner.emit.megatron_refusals import refusals
    from planner.emit.megatron_row import notes_of, row_of
    from planner.emit.megatron_rules import Run
    from planner.emit.shell import read_script

    script = read_script(read_text(path))
    flags = parse_flags(script.text)
    gpus = asked.gpus or devices_of(script.text)
    run = Run(flags=flags, num_devices=gpus or 1, model={})
    for told in (*flags.broken, *refusals(run)):
        left = f" (left out: {'; '.join(script.unknown)})" if script.unknown else ""
        raise ModelError(f"{path}: {told}{left}")
    row = row_of(run, {}, "", "H100")
    cells = Cells({name: str(value) for name, value in row.items()})
    stack = stack_of_row(cells)
    sizes = replace(
        sizes_of_row(cells, stack),
        dropout=bool(row.get("dropout")),
        fused_attention=stack.flash_attention,
    )
    refuse_other_length(path, asked, sizes.seq_len)
    if "kv-channels" not in flags.values and sizes.hidden % sizes.heads:
        raise ModelError(
            f"--hidden-size {sizes.hidden} is no multiple of --num-attention-heads {sizes.heads}; "
            "change one, or give --kv-channels"
        )
    turned = sizes.latent.rope_dim if sizes.latent else sizes.head_width
    if sizes.positions == "rotary" and turned % 2:
        raise ModelError(
            f"heads of {turned} have no pairs for rotary positions; give an even width"
        )
    multiple = run.number("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE)
    sizes = replace(sizes, vocab=padded_vocab(sizes.vocab, multiple))
    notes = [
        f"{path}: {sizes.layers} layers of {sizes.hidden}, {sizes.heads} heads, vocabulary "
        f"{sizes.vocab}, sequences of {sizes.seq_len}, for {stack.name}; how it is laid out is "
        "searched (--keep-layout: as the script has it)"
    ]
    if script.unknown:
        notes.append(
            f"{path} is read without running it; what follows these is left out: "
            + "; ".join(script.unknown)
        )
    precision, told = _precision(run)
    notes += [told] if told else []
    notes += [f"assumed: {each}" for each in cells.assumed]
    notes += [note for note in notes_of(run) if note.startswith("assumed: ")]
    return Opened(
        name=name_of(path.stem, "megatron"),
        code=decoder_file("A decoder as flags of Megatron-LM describe it", sizes),
        trained={"precision": precision, **_trained(path, run, gpus, stack.name)},
        layout=_layout(row),
        notes=tuple(notes),
    )


def devices_of(text: str) -> int | None:
    """Return the devices that torchrun or Slurm is told of; None: it is not said."""
    here = _number(text, r"--nproc[-_]per[-_]node|--gpus-per-node|--ntasks-per-node")
    nodes = _number(text, r"--nnodes|--nodes")
    return None if here is None else here * (nodes or 1)


def _number(text: str, names: str) -> int | None:
    found = re.search(rf"(?:{names})[= ]+(\d+)\b", text)
    return int(found[1]) if found else None


def _trained(path: Path, run: Any, gpus: int | None, stack: str) -> dict[str, Any]:
    clip = run.flags.values.get("clip-grad", USUAL_CLIP)  # as it is written, since it has no price
    try:
        clips = float(clip) > 0
    except ValueError:
        raise ModelError(f"{path}: --clip-grad {clip} was given; it takes a number") from None
    found: dict[str, Any] = {
        "clip_gradients": clips,
        "execution": stack,
    }
    if gpus:
        found["gpus"] = gpus
    if run.number("global-batch-size"):
        found["global_batch"] = run.number("global-batch-size")
    elif run.number("micro-batch-size") and run.dp:
        found["global_batch"] = run.number("micro-batch-size") * run.dp
    return found


GRADIENTS = {"hybrid": "e5m2", "e4m3": "e4m3"}
"""Dtypes of gradients in 8 bits, by --fp8-format."""


def _precision(run: Any) -> tuple[str, str]:
    """Return the precision of plans that is nearest to a script's, and a line where it is not the
    same.
    """
    wide = next((name for name in ("bf16", "fp16") if run.has(name)), "model")
    name = next((name for name in ("fp4", "fp8") if run.has(f"{name}-format")), "")
    if not name:
        return wide, ""
    given = f"--{name}-format {run.word(f'{name}-format')}"
    recipe = run.word(f"{name}-recipe") if run.has(f"{name}-recipe") else "its usual"
    for precision in MEGATRON_LM.precisions:
        flags = RECIPES.get(scaling_named(precision), {})
        if (name, wide, recipe) == ("fp8", "bf16", flags.get("fp8-recipe")):
            own = flags["fp8-format"]
            told = f"{given}: gradients of plans are in {GRADIENTS[own]}"
            return precision, "" if given.endswith(own) else told
    return wide, (
        f"{given} with {recipe} scales is in no plan: it is searched in {wide}; --precision "
        "fp8-tensorwise has one scale a tensor, of its own numbers (--fp8-recipe tensorwise), "
        "mxfp8 has one for 32 neighbours (--fp8-recipe mxfp8)"
    )


def _layout(row: dict[str, Any]) -> dict[str, Any]:
    names = {"zero": "zero_stage", "microbatch_size": "micro_batch"}
    found = {
        name: row[column]
        for name in ("tp", "pp", "vpp", "cp", "zero", "microbatch_size")
        if row.get(column := names.get(name, name)) not in (None, "")
    }
    recompute = str(row.get("recompute") or "none")
    # What is recomputed of a layer is searched: its selections are other ops than these here.
    return found | ({"recompute": recompute} if recompute in ("none", "full") else {})

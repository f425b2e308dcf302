"""A Megatron-LM script or flags: held to all of its rules, then a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands.doors.megatron import devices_of
from commands.doors.opened import read_text
from commands.doors.runs.described import (
    Columns,
    Configuration,
    DescribedRun,
    columns_of_sizes,
)
from planner.errors import PlannerError

_ARGUMENTS = re.compile(r"""["']?\$(?:[@*]|\{[@*]\})["']?""")


def text_of(flags: str) -> str:
    """Return the flags themselves, of a file if that is what was named: a script is read as a shell
    would read it.
    """
    if flags.lstrip().startswith("-") or len(flags) > 255:
        return flags
    path = Path(flags)
    try:
        text = path.read_text() if path.is_file() else flags
    except (OSError, ValueError) as error:
        raise PlannerError(f"{flags} is not readable ({error}); give a text of flags") from None
    return _script(text) if path.suffix == ".sh" else text


def _script(text: str) -> str:
    from planner.emit.shell import read_script

    # (A script hands on its own arguments, which it was given none of here.)
    return _ARGUMENTS.sub("", read_script(text).text)


def broken_in(text: str, gpus: int, model: str) -> list[str]:
    """Return the rules that a line of flags breaks, a line each; what is not priced comes last, as
    it may change with the others.
    """
    from planner.emit.megatron_refusals import refusals
    from planner.emit.megatron_rules import broken_rules

    run, _ = _run_of(text, gpus, model)
    return broken_rules(run) or refusals(run)


def described(text: str, gpus: int, model: str, gpu: str) -> DescribedRun:
    """Return a line of flags that breaks no rule as a row."""
    from planner.emit.megatron_row import notes_of, row_of

    run, columns = _run_of(text, gpus, model)
    notes = notes_of(run)
    if run.flags.unknown:
        unknown = ", ".join(f"--{name}" for name in dict.fromkeys(run.flags.unknown))
        notes.append(f"not of Megatron-LM's options, of no part in the price: {unknown}")
    return DescribedRun(row=row_of(run, columns, model, gpu), notes=tuple(notes))


def _run_of(text: str, gpus: int, model: str) -> tuple[Any, dict[str, int]]:
    from planner.emit.megatron_options import parse_flags
    from planner.emit.megatron_row import OPTION_OF
    from planner.emit.megatron_rules import Run

    columns = columns_of(model)
    sizes = {OPTION_OF[name]: size for name, size in columns.items() if name in OPTION_OF}
    return Run(flags=parse_flags(text), num_devices=gpus, model=sizes), columns


def columns_of(model: str) -> dict[str, int]:
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
    from commands.render.console import begin_stage
    from planner.language.stacks.transformer_graph import sizes_of

    begin_stage("reading the model")
    return columns_of_sizes(sizes_of(graph_of(path)))


def _read(path: Path, known: Columns) -> DescribedRun:
    text = _script(read_text(path))
    gpus = _number(known, "gpus") or devices_of(text)
    if not gpus:
        raise PlannerError(f"{path} does not say on how many devices it ran; give --gpus")
    model = str(known.get("model") or "")
    if broken := broken_in(text, gpus, model):
        raise PlannerError(f"{path}: {broken[0]}")
    return described(text, gpus, model, str(known.get("gpu") or ""))


def _number(known: Mapping[str, Any], name: str) -> int:
    value = known.get(name)
    return value if isinstance(value, int) else 0


def _is_for(path: Path) -> bool:
    if not path.is_file() or path.suffix in (".py", ".json", ".toml", ".yaml", ".yml"):
        return False
    text = read_text(path)
    return "--micro-batch-size" in text or "--num-layers" in text


MEGATRON = Configuration(name="a Megatron-LM script or list of flags", is_for=_is_for, read=_read)
"""The kind."""

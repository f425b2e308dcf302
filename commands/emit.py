"""`planner emit`: a plan as another system's configuration, or as a script that starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.models import MaybeModel
from commands.common.options import JsonOption, spread
from commands.render.console import check_writable, show_json, show_note, show_written
from commands.render.flags import with_flags
from planner.files import write_atomically


@spread(MaybeModel)
def emit(
    plan: Annotated[Path | None, typer.Argument(help="A plan made by `planner search`.")] = None,
    *,
    given: MaybeModel,
    to: Annotated[
        str, typer.Option(help="The system: `--to list` lists them.", show_default=False)
    ] = "list",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("."),
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Let the system differ from the plan in this. Repeatable."),
    ] = None,
    script: Annotated[
        str, typer.Option(help="Launch scripts start this script, which calls planner.apply.")
    ] = "train.py",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. Default: as the plan's cluster.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a plan for other systems, or as a launch script.

    Systems: Megatron-LM, Megatron-Bridge, torchtitan, DeepSpeed, nanotron, accelerate; scripts:
    torchrun, Slurm, Kubernetes, Ray. `--to list` names them all.

    Example: planner emit plan.json model.py --to megatron-lm
    """
    from planner.emit import EMITTERS, Launch, PlanView, find_emitter, refusals
    from planner.emit import emit as emit_plan
    from planner.errors import PlanError
    from planner.language.plan import load_plan

    if device not in (None, "cpu", "cuda"):
        raise PlanError(f"`device` {device} was given; use cpu or cuda")
    if to == "list" and as_json:
        show_json({"systems": {name: EMITTERS[name].summary for name in sorted(EMITTERS)}})
        return 0
    if to == "list":
        width = max(map(len, EMITTERS))
        for name in sorted(EMITTERS):
            print(f"{name:<{width}}  {EMITTERS[name].summary}")
        return 0
    if plan is None:
        raise PlanError(f"--to {to} writes a plan and none was given; give PLAN")
    emitter = find_emitter(to)
    loaded = load_plan(plan)
    model = given.file_of(loaded)
    view = PlanView(
        plan=loaded,
        graph=None if model is None else graph_of_plan(loaded, model),
        launch=Launch(plan_file=str(plan), script=script, device=device or "", folder=str(out)),
        accepted=tuple(accept or ()),
    )
    refused = refusals(view, emitter)
    for refusal in refused:
        line = with_flags(f"{emitter.name} can't express {refusal}")
        print(f"planner: {line}", file=sys.stderr)
    if refused:
        return 2
    emitted = emit_plan(view, emitter)
    sources = (plan,) if model is None else (plan, model)
    for name in emitted.files:
        check_writable(out / name, "the emitted file", sources)
    for name, text in emitted.files.items():
        path = out / name
        write_atomically(path, text)
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
        show_written(f"wrote {path}", as_json)
    for note in emitted.notes:
        show_note(note)
    if as_json:
        files = [str(out / name) for name in emitted.files]
        notes = [with_flags(note) for note in emitted.notes]
        show_json({"system": emitter.name, "files": files, "notes": notes})
    return 0

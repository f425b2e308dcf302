"""`planner convert`: checkpoints, safetensors and state dicts into each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.options import JsonOption
from commands.render.console import show_json, show_progress, show_results
from planner.errors import PlannerError


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a folder of them (the newest is taken), a .safetensors file, a "
            "folder of them with its index, or a state_dict (.pt)."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="A folder, or a file that ends in .safetensors or .pt.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="checkpoint, safetensors, state-dict, or training (a .pt with the state dicts of "
            "model and optimizer). Default: by the suffix; a folder becomes safetensors of a "
            "checkpoint, and a checkpoint of others."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Write a checkpoint as the ranks of this plan would, a file each."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The .py file of the model: of the plan's, or of weights, whose folder gets the "
            "config.json of a Hugging Face model."
        ),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Largest shard of safetensors, in GB.")
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to or from safetensors and others.

    Works offline and tensor by tensor. From checkpoint to checkpoint all of the training is
    carried, a plain script's {"model": ..., "optimizer": ...} goes both ways; other kinds hold the
    model's weights. Any checkpoint can be loaded under any plan: no
    conversion is needed for that.

    Example: planner convert run weights
    """
    from planner.capture import build_source, load_model_file
    from planner.language.plan import load_plan
    from planner.runtime.checkpoint.convert import convert as convert_files
    from planner.units import format_bytes

    if plan is not None and model is None:
        raise PlannerError("--plan was given without its model; give --model, too")
    if not math.isfinite(shard_gb):
        raise PlannerError(f"--shard-gb {shard_gb} was given; use a number of GB, such as 5")
    with show_progress("converting") as progress:
        loaded = None if plan is None else load_plan(plan)
        graph = None
        built = None
        if loaded is not None and model is not None:
            progress(0.0, "capturing the model")
            graph = graph_of_plan(loaded, model)
        elif model is not None:
            progress(0.0, "building the model")
            built = build_source(load_model_file(model))
        done = convert_files(
            source,
            target,
            kind=to,
            plan=loaded,
            graph=graph,
            model=built,
            shard_bytes=int(shard_gb * 1e9),
            progress=progress,
        )
    if as_json:
        show_json(
            {
                "kind": done.kind,
                "target": str(done.path),
                "source": str(done.source),
                "num_tensors": done.num_tensors,
                "size_bytes": done.nbytes,
                "has_config": done.has_config,
            }
        )
        return
    show_results(
        f"{done.kind} {done.path}: {done.num_tensors} tensors, {format_bytes(done.nbytes)}, "
        f"from {done.source}"
    )
    if done.has_config:
        show_results("config.json is beside them: from_pretrained loads the folder")
    elif built is not None:
        show_results(
            f"without config.json: the model of {model} is none of Hugging Face's "
            "(transformers.PreTrainedModel)"
        )

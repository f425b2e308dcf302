"""Arguments and options that several commands take, and groups of them as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

CHOICES = "Choices to fix (searched if not given)"
TRAINING = "How it trains"
SEARCHING = "How it is searched"
COMPARED = "Other plans to compare"
"""Panels of the help of `search` and `why`."""

PlanFile = Annotated[Path, typer.Argument(help="A plan made by `planner search`.")]
RunFolder = Annotated[Path, typer.Argument(help="Made by `planner launch --timeline FOLDER`.")]


def _profile_names(incomplete: str) -> list[str]:
    """What a shell completes: names of shipped profiles."""
    from profiles import shipped_names

    return [name for name in shipped_names() if name.startswith(incomplete)]


ProfileOption = Annotated[
    str | None,
    typer.Option(
        help="Shipped profile name or profile directory. Default: this machine's own.",
        autocompletion=_profile_names,
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(help="A cluster file (TOML): groups of devices and the links around them."),
]
PlansProfileOption = Annotated[
    str | None,
    typer.Option(
        help="Shipped profile name or profile directory. Default: the plan's.",
        autocompletion=_profile_names,
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option(help="Money per device and hour: 2.5 or 2.5/gpu-hour.", rich_help_panel=COMPARED),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda. Default: cuda if there is one, else cpu.")
]
CLIP = typer.Option(
    help="Count the clipping of gradients by their norm (apply's max_grad_norm).",
    rich_help_panel=TRAINING,
)
ClipOption = Annotated[bool, CLIP]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="What may differ from one process where the batch is cut: local-samples, "
        "local-buffers, unknown-ops. Repeatable.",
        rich_help_panel=TRAINING,
    ),
]
RUNTIMES = (
    "ours-eager is `planner launch`, ours-compiled with compiled blocks, ours-graphs with these in "
    "CUDA graphs; others are "
    "systems that plans can be written for (megatron, megatron-bridge, titan, deepspeed, nanotron, "
    "accelerate) and more."
)
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document on stdout, all else on stderr (docs/json.md)."
    ),
]
TraceOption = Annotated[
    Path | None, typer.Option(help="Also write a trace for chrome://tracing or ui.perfetto.dev.")
]


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether a command line has it by its place."""
    declared = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(each, typer.models.ArgumentInfo) for each in declared)


def spread(group: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command's parameter of type `group`, a dataclass, an option for each field.

    The options stand where the parameter stood; the command gets them as one object. Fields
    are annotated as options are.
    """
    hints = get_type_hints(group, include_extras=True)
    options = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        (own_name,) = (parameter.name for parameter in own if parameter.annotation is group)
        parameters: list[inspect.Parameter] = []
        for parameter in own:
            if parameter.name == own_name:
                parameters += options.values()
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        in_order = [each.name for each in parameters if _is_argument(each)]

        @wraps(command)
        def with_options(*placed: Any, **values: Any) -> Any:
            # Arguments may be given in order, as on the command line.
            values |= dict(zip(in_order, placed, strict=False))
            given = group(**{name: values.pop(name) for name in options if name in values})
            return command(**values, **{own_name: given})

        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_options

    return decorate

"""The model that a command is given: a .py file, or a file of another system (`commands.doors`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.doors.said import Said
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.language.plan import Plan

_MODEL_HELP = (
    "A .py file with model() and batch(size); or a Hugging Face config.json or its folder, a "
    "Megatron-LM script or list of flags, a torchtitan .toml."
)
_PANEL = "A model that is no .py file"


@dataclass(frozen=True, kw_only=True)
class GivenModel:
    """A model as a command is given it."""

    model: Annotated[Path, typer.Argument(help=_MODEL_HELP)]
    seq_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample, of a config.json.", rich_help_panel=_PANEL),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="What a config.json is trained for, such as causal-lm. Default: as its "
            "architecture says.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def opened(self, gpus: int | None = None) -> tuple[Path, Said]:
        """Return the model file, and what else the given file says of a run on so many devices.

        Raises PlannerError, in one line, where the file is of no kind that is read, or does not say
        what a model needs.
        """
        if self.model.suffix == ".py" and self.seq_length is self.task is None:
            return self.model, Said()
        from commands.doors import Asked, open_model

        asked = Asked(seq_length=self.seq_length, task=self.task, gpus=gpus)
        path, opened = open_model(self.model, asked)
        return path, opened or Said()

    def file_of(self, plan: Plan | Path) -> Path:
        """Return the model file for a plan, or a plan's file; what is not given is as the plan has
        it.
        """
        if self.model.suffix == ".py" or self.seq_length is not None:
            return self.opened()[0]
        from dataclasses import replace

        from planner.language.plan import load_plan

        loaded = load_plan(plan) if isinstance(plan, Path) else plan
        return replace(self, seq_length=_length_of(loaded)).opened()[0]

    @property
    def words(self) -> str:
        """The words that give the same model to another command."""
        words = [str(self.model)]
        words += [f"--seq-length {self.seq_length}"] * (self.seq_length is not None)
        words += [f"--task {self.task}"] * (self.task is not None)
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class MaybeModel(GivenModel):
    """A model that a command can do without."""

    model: Annotated[Path | None, typer.Argument(help=_MODEL_HELP)] = None  # type: ignore[assignment]

    def file_of(self, plan: Plan | Path) -> Path | None:  # type: ignore[override]
        """Return the model file for a plan; None where no model is given."""
        if self.model is not None:
            return super().file_of(plan)
        for option, value in (("--seq-length", self.seq_length), ("--task", self.task)):
            if value is not None:
                raise PlannerError(f"{option} {value} was given without a model; name it, too")
        return None


def _length_of(plan: Plan) -> int | None:
    """Return the tokens of a sample that a plan is for; None where samples are no sequences."""
    for _, dtype, shape in plan.model.inputs:
        if dtype == "int64" and len(shape) == 2 and isinstance(shape[1], int):
            return shape[1]
    return None

"""What a measured GPU profile replaces in the shipped one: kept beside this file as JSON."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import ProfileError
from profiles import Profile
from profiles.records import (
    Direction,
    Figure,
    HostWork,
    OpFit,
    PaceKind,
    ProfileFile,
    StepFit,
)

HERE = Path(__file__).parent


class Kept(BaseModel):
    """The compute part of a profile: everything that does not depend on links and nodes.

    Figures that one GPU alone can't give, such as the slowdown by overlap, may be empty: the
    shipped ones then stay.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    op_fits: tuple[OpFit, ...]
    step_fits: tuple[StepFit, ...]
    context_bytes: Figure
    allocator_overhead_fraction: Figure
    launch_overhead_s: Figure
    host_work: dict[HostWork, Figure] = Field(default_factory=dict)
    typical_slowdown: dict[PaceKind, Figure] = Field(default_factory=dict)
    overlap_slowdown: dict[str, Figure]
    block_correction: dict[Direction, Figure]
    compiled_block_correction: dict[Direction, Figure]


def keep(measured: Profile) -> Kept:
    """Return the compute part of a profile, with where and when in every detail."""
    when = max(record.measured_at for record in measured.ops)[:10]
    torch = ", ".join(sorted({record.torch for record in measured.ops}))
    where = f"measured on {measured.cluster.device}, {when}, torch {torch}"

    def told(item):
        return item.model_copy(update={"detail": f"{where}: {item.detail}"})

    file = measured.file
    return Kept(
        op_fits=tuple(told(fit) for fit in file.op_fits if "." not in fit.family),
        step_fits=tuple(told(fit) for fit in file.step_fits),
        **{name: told(getattr(file, name)) for name in _FIGURES},
        **{
            name: {key: told(figure) for key, figure in getattr(file, name).items()}
            for name in _TABLES
        },
    )


_FIGURES = ("context_bytes", "allocator_overhead_fraction", "launch_overhead_s")
_TABLES = (
    "host_work",
    "typical_slowdown",
    "overlap_slowdown",
    "block_correction",
    "compiled_block_correction",
)


def write_kept(name: str, kept: Kept, folder: Path = HERE) -> Path:
    """Write what a shipped profile is to be made with; return the file."""
    path = folder / f"{name}.json"
    path.write_text(kept.model_dump_json(indent=1, exclude_none=True) + "\n")
    return path


def read_kept(name: str, folder: Path = HERE) -> Kept | None:
    """Return what was kept for a shipped profile; None if nobody measured it."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        return Kept.model_validate_json(path.read_text())
    except ValueError as error:
        why = str(error).splitlines()[0]
        raise ProfileError(f"{path} is damaged ({why}); measure again with --keep") from None


def with_measured(file: ProfileFile, kept: Kept | None) -> ProfileFile:
    """Return a shipped profile with measured numbers in place of fitted and assumed ones."""
    if kept is None:
        return file
    known = {(fit.family, fit.dtype, fit.direction) for fit in kept.op_fits}
    others = [f for f in file.op_fits if (f.family, f.dtype, f.direction) not in known]
    tables = {name: {**getattr(file, name), **getattr(kept, name)} for name in _TABLES}
    return file.model_copy(
        update={
            "op_fits": (*kept.op_fits, *others),
            "step_fits": kept.step_fits or file.step_fits,
            **{name: getattr(kept, name) for name in _FIGURES},
            **tables,
        }
    )

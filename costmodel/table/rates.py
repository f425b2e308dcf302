"""The fitted rates of a device, read from its shipped profile's `training.json`."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costmodel.table.kernels import DeviceRates
from planner.errors import ProfileError
from profiles import Profile
from profiles.catalog import SHIPPED
from profiles.records import Figure

OF_THE_SHEET = ("peak_flop_per_s", "memory_bytes_per_s", "num_multiprocessors", "link_scale")
FITTED = tuple(f.name for f in fields(DeviceRates) if f.name not in OF_THE_SHEET)
"""Names of the fitted parameters: the same few for every run of a device."""

STANDS_IN = {"h200-sxm-141gb": "h100-sxm5-80gb", "a100-pcie-80gb": "a100-sxm4-80gb"}
"""Devices without published runs of their own use the rates of their nearest kin."""


class TrainingRates(BaseModel):
    """`training.json`: fitted rates with their origin, and how well they fit what.

    `residuals` pairs a source with the mean absolute relative error left there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_multiprocessors: Figure
    rates: dict[str, Figure]
    residuals: dict[str, float] = Field(default_factory=dict)


def has_rates(profile: Profile) -> bool:
    """Whether published runs told the rates of a profile's device, or of its nearest kin."""
    return _path(profile).exists()


def load_rates(profile: Profile) -> DeviceRates:
    """Return the rates a published run on this machine is priced with.

    Raises ProfileError when the profile's device has none, or its file is damaged.
    """
    record = _load(_path(profile))
    cluster = profile.cluster
    return DeviceRates(
        peak_flop_per_s=dict(cluster.peak_flop_per_s),
        memory_bytes_per_s=cluster.memory_bytes_per_s,
        num_multiprocessors=int(record.num_multiprocessors.value),
        **{rate: record.rates[rate].value for rate in FITTED},
    )


def _path(profile: Profile) -> Path:
    name = profile.name.partition("@")[0]
    return SHIPPED / STANDS_IN.get(name, name) / "training.json"


@lru_cache(maxsize=16)
def _load(path: Path) -> TrainingRates:
    try:
        record = TrainingRates.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ProfileError(
            f"profile {path.parent.name} has no {path.name}; estimate rows of devices that do"
        ) from None
    except (OSError, ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ProfileError(f"{path} is damaged ({reason}); restore it") from None
    missing = [rate for rate in FITTED if rate not in record.rates]
    if missing:
        raise ProfileError(f"{path} lacks {', '.join(missing)}; restore it")
    return record


def save_rates(path: Path, record: TrainingRates) -> None:
    """Write a `training.json`."""
    path.write_text(json.dumps(record.model_dump(mode="json"), indent=1) + "\n")

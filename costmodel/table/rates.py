"""The fitted rates of a device, from its file in `profiles/data/devices`."""

from __future__ import annotations

from dataclasses import fields

from costmodel.table.kernels import DeviceRates
from planner.errors import ProfileError
from profiles import Profile
from profiles.devices import TrainingRates, device_file, device_names

OF_THE_SHEET = ("peak_flop_per_s", "memory_bytes_per_s", "num_multiprocessors", "link_scale")
FITTED = tuple(f.name for f in fields(DeviceRates) if f.name not in OF_THE_SHEET)
"""Names of the fitted parameters: the same few for every run of a device."""


def has_rates(profile: Profile) -> bool:
    """Whether published runs told the rates of a profile's device, or of the one it names."""
    return _record(profile) is not None


def load_rates(profile: Profile) -> DeviceRates:
    """Return the rates a published run on this machine is priced with.

    Raises ProfileError when the profile's device has none, or some are missing.
    """
    record = _record(profile)
    if record is None:
        raise ProfileError(
            f"profile {profile.name} has no training rates; estimate rows of devices that do"
        )
    missing = [rate for rate in FITTED if rate not in record.rates]
    if missing:
        raise ProfileError(f"the training rates of {profile.name} lack {', '.join(missing)}")
    cluster = profile.cluster
    return DeviceRates(
        peak_flop_per_s=dict(cluster.peak_flop_per_s),
        memory_bytes_per_s=cluster.memory_bytes_per_s,
        num_multiprocessors=int(record.num_multiprocessors.value),
        **{rate: record.rates[rate].value for rate in FITTED},
    )


def residuals_of(profile: Profile) -> dict[str, float]:
    """Return the mean absolute relative error that the rates leave, by source of the runs.

    Empty where no published run is of the profile's device.
    """
    record = _record(profile)
    return {} if record is None else dict(record.residuals)


def _record(profile: Profile) -> TrainingRates | None:
    """Return a shipped profile's rates, or those of the device it names for them."""
    name = profile.name.partition("@")[0]
    device = device_file(name).shipped if name in device_names() else None
    if device is not None and device.training_of is not None:
        device = device_file(device.training_of).shipped
    return None if device is None else device.training

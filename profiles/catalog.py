"""Find a profile: by directory, by the name of a shipped one, or the best for this machine."""

from __future__ import annotations

import difflib
import os
import platform
import re
from pathlib import Path

from planner.cache_folder import cache_dir
from planner.errors import ProfileError
from profiles.devices import profile_for_gpu, shipped_for_gpu, shipped_names, shipped_profile
from profiles.link_rates import with_inter_node
from profiles.profile import Profile
from profiles.records import ProfileFile
from profiles.store import (
    PROFILE_FILE,
    check_writable,
    read_collectives,
    read_ops,
    read_profile_file,
    write_collectives,
    write_ops,
    write_profile_file,
)


def load_profile(name_or_dir: str | os.PathLike[str]) -> Profile:
    """Load a profile directory, or a shipped profile by name or unambiguous prefix.

    ``NAME@LINK`` chooses another inter-node link of a shipped profile, as in
    ``h100-sxm5@ib-200``. Raises ProfileError, in one line, when there is no such profile, a
    file is missing or damaged, or the schema is of another version.
    """
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        return _load_directory(path)
    text = os.fspath(name_or_dir)
    if path.exists():
        raise ProfileError(f"{path} is a file; give the profile's directory or a shipped name")
    if os.sep in text:
        raise ProfileError(
            f"no profile directory {text}; measure one with `measure_profile` `out` {text}"
        )
    name, _, link = text.partition("@")
    file = shipped_profile(_resolve(name, text))
    return Profile(_with_link(file, link) if link else file)


def save_profile(profile: Profile, directory: Path) -> None:
    """Write a profile into a directory, of which `load_profile` reads it again.

    Raises ProfileError where that can't be written. What is not measured has no records.
    """
    check_writable(directory)
    if profile.source == "measured":
        write_ops(directory, profile.ops)
        write_collectives(directory, profile.collectives)
    write_profile_file(directory, profile.file)


def _load_directory(path: Path) -> Profile:
    file = read_profile_file(path)
    if file.source == "shipped" and not (path / "ops.csv").exists():
        return Profile(file)
    return Profile(file, read_ops(path), read_collectives(path))


def _resolve(name: str, given: str) -> str:
    names = shipped_names()
    wanted = name.lower()
    found = [full for full in names if full == wanted] or [
        full for full in names if full.startswith(wanted + "-")
    ]
    if len(found) == 1:
        return found[0]
    near = found or difflib.get_close_matches(wanted, names, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ProfileError(
        f"no profile {given!r}; {hint}give a profile directory or one of: {', '.join(names)}"
    )


def _with_link(file: ProfileFile, suffix: str) -> ProfileFile:
    links = file.cluster.other_inter_node
    if suffix not in links:
        raise ProfileError(
            f"profile {file.name} has no inter-node link {suffix!r}; use one of: "
            f"{', '.join(sorted(links)) or '(none)'}"
        )
    return with_inter_node(file, links[suffix], name=f"{file.name}@{suffix}")


def own_profile_dir(device: str | None = None) -> Path:
    """Return where this machine's own profile lives when no other place is named."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", platform.node() or "machine")
    return cache_dir() / "profiles" / f"{host}-{device or _device_here()}"


def calibrated_dir(name: str | None, profile: Profile) -> Path:
    """Return where what runs showed of a profile is written: its own directory if it has one.

    `name` is how it was named, None where it was chosen. A shipped profile has its calibrated copy
    beside the measured ones, and is used where it is named: a run may have been on another machine.
    """
    if name is not None and Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if profile.source == "measured":
        return own_profile_dir()
    return cache_dir() / "profiles" / f"{profile.name}-calibrated"


def default_profile(device: str | None = None) -> tuple[Profile, str]:
    """Return the profile to use when none is named, and a line that says which and why.

    This machine's own, else the shipped one of the GPU found, else a shipped one. The line
    is empty for the machine's own.
    """
    own = own_profile_dir(device)
    if (own / PROFILE_FILE).exists():
        return load_profile(own), ""
    gpu = _gpu_name() if device != "cpu" else None
    if gpu is not None:
        if name := shipped_for_gpu(gpu):
            return load_profile(name), (
                f"this machine has no profile of its own; using the shipped {name} for {gpu} "
                "(measure with `measure_profile`)"
            )
        if file := profile_for_gpu(gpu):
            return Profile(file), (
                f"this machine has no profile of its own; using {file.name}'s data sheet for {gpu} "
                "(measure with `measure_profile`)"
            )
        because = f"no shipped profile is of {gpu}"
    else:
        because = "this machine has no profile of its own"
    return load_profile(FALLBACK), (
        f"{because}; assuming the shipped {FALLBACK}: times are not of this machine "
        "(name another `profile`, or measure with `measure_profile`)"
    )


FALLBACK = "h100-sxm5-80gb"
"""The shipped profile to assume on a machine of which nothing is known."""


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _device_here() -> str:
    return "cpu" if _gpu_name() is None else "cuda"

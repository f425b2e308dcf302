"""The folder of a run's checkpoints: how one appears whole or not at all, and which is the newest.

    checkpoints/
      000007-step-1400/     a checkpoint: files of torch.distributed.checkpoint and a manifest
      000008-step-1600/     the newest: numbers only grow; nothing else says which it is
      .saving-000009/       under way, or what a crash left of it
      .removing-000006/     on its way out

A checkpoint is written under a hidden name. Its manifest, written last, has the size and checksum
of every file; when all of it is on the disk, the folder is renamed. So a crash at any moment
leaves what was there before, and what is under a checkpoint's name was once whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from planner.errors import PlanError

MANIFEST = "planner.json"
FORMAT = "planner-checkpoint"
VERSION = 1

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself, in JSON.

    Attributes:
        step: optimizer steps done.
        samples: samples trained on: where the data goes on.
        precision: of the plan it was saved under.
        ranks: of that plan, in words.
        model: the model's name.
        fingerprint: of the captured model.
        state: by name in the model's state dict: the FQN it is stored under, and its dtype there.
        files: by name: size in bytes and CRC-32.
        versions: of planner and torch, that wrote it.
    """

    step: int
    samples: int
    precision: str
    ranks: str
    model: str
    fingerprint: str
    state: Mapping[str, tuple[str, str]]
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises PlanError where it is missing, damaged or too new."""
    path = checkpoint / MANIFEST
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        version = data.pop("version")
        if version == VERSION:
            data["state"] = {name: (fqn, dtype) for name, (fqn, dtype) in data["state"].items()}
            data["files"] = {name: (size, crc) for name, (size, crc) in data["files"].items()}
            return Manifest(**data)
    except FileNotFoundError:
        raise PlanError(f"{checkpoint} is no checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise PlanError(f"{path} is damaged ({error}); use another checkpoint") from None
    raise PlanError(
        f"{checkpoint} has checkpoint version {version!r} and this planner reads {VERSION}; "
        "update planner"
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint, by its name or by its manifest."""
    return _NAME.fullmatch(folder.name) is not None or (folder / MANIFEST).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first. Raises PlanError where there are none."""
    found = sorted(_numbered(folder), reverse=True)
    if not found:
        raise PlanError(
            f"{folder} has no checkpoint; give a folder that engine.save wrote to, one of the "
            "checkpoints in it, or weights in safetensors"
        )
    return [path for _, path in found]


def newest_in(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, if it has any."""
    return max(_numbered(folder), default=(0, None))[1]


def sweep(folder: Path) -> None:
    """Remove what crashed runs have left of checkpoints that are none; nothing may be saving."""
    for left in folder.iterdir() if folder.is_dir() else ():
        if left.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(left)


def begin(folder: Path) -> Path:
    """Return a new folder to write to, and remove what crashed runs have left."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    number = max((number for number, _ in _numbered(folder)), default=0) + 1
    scratch = folder / f"{_SAVING}{number:06d}"
    scratch.mkdir()
    return scratch


def commit(scratch: Path, manifest: Manifest) -> Path:
    """Make what was written a checkpoint; return its path. The files are on the disk already."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1)
    with open(scratch / MANIFEST, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(scratch)
    number = scratch.name.removeprefix(_SAVING)
    target = scratch.with_name(f"{number}-step-{manifest.step}")
    # The rename is atomic: the checkpoint is there as a whole, or not at all.
    os.rename(scratch, target)
    _sync_folder(target.parent)
    return target


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints. One that is half removed has no checkpoint's name."""
    for number, path in sorted(_numbered(folder))[:-keep]:
        away = folder / f"{_REMOVING}{number:06d}"
        os.rename(path, away)
        shutil.rmtree(away)


def what_is_wrong(
    checkpoint: Path,
    files: Iterable[tuple[str, tuple[int, int]]],
    checksum: Callable[[Path], tuple[int, int]],
) -> str:
    """Return what is wrong with the first damaged file, in words; nothing where all are whole."""
    for name, (size, expected) in files:
        path = checkpoint / name
        try:
            found, crc = checksum(path)
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        if found != size:
            return f"{name} has {found} bytes of {size}"
        if crc != expected:
            return f"{name} has another checksum than when it was written"
    return ""


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in entries)
    return [(int(match[1]), entry) for match, entry in matches if match]


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk: a rename is else only in memory."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Where tensors are read from, by the names of a model's state dict and by boxes.

A checkpoint, safetensors (a file, or a folder as Hugging Face has it), or a `state_dict` in a
``.pt`` file. The last two are mapped into memory: a rank that reads its boxes reads nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from planner.errors import PlanError
from planner.language.layout.boxes import Box, Shape, sizes
from planner.language.lowering.holdings import model_key
from planner.runtime.checkpoint import folder as folders
from planner.runtime.checkpoint.parts import Part
from planner.runtime.checkpoint.storage import Stored, Target, file_checksum
from planner.runtime.checkpoint.weight_files.safetensors_files import (
    INDEX,
    SINGLE,
    read_file,
    read_folder,
)
from planner.runtime.checkpoint.weight_files.single_device import split_training

STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tensor before it is read. `same` names tensors that share its values."""

    shape: Shape
    dtype: torch.dtype
    same: str


class Source(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, Known]:
        """What there is, in order."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, on the CPU."""


class MappedSource:
    """Tensors that are in memory, or mapped into it; beside them an optimizer's state dict."""

    def __init__(
        self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors, self.optimizer = tensors, optimizer
        first: dict[tuple[int, Shape], str] = {}
        self.tensors = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            same = name
            if tensor.numel():
                same = first.setdefault((tensor.data_ptr(), shape), name)
            self.tensors[name] = Known(shape, tensor.dtype, same)

    def whole(self, name: str) -> Tensor:
        """Return all of a tensor."""
        return self._tensors[name]

    def read(self, name: str, box: Box) -> Tensor:
        """Return a view of the box."""
        return self._tensors[name][tuple(slice(start, stop) for start, stop in box)]


class CheckpointSource:
    """The model of a checkpoint. Raises PlanError for one that is damaged."""

    def __init__(self, checkpoint: Path, *, is_checked: bool = False) -> None:
        self.path, self.manifest = checkpoint, folders.read_manifest(checkpoint)
        files = () if is_checked else self.manifest.files.items()
        wrong = folders.what_is_wrong(checkpoint, files, file_checksum)
        if wrong:
            raise PlanError(f"{checkpoint}: {wrong}; give another checkpoint")
        self.stored = Stored(checkpoint)
        self.tensors = {}
        found = self.stored.metadata.state_dict_metadata
        for name, (fqn, dtype) in self.manifest.state.items():
            known = found.get(model_key(fqn))
            if isinstance(known, TensorStorageMetadata):  # what has no elements is not stored
                self.tensors[name] = Known(tuple(known.size), getattr(torch, dtype), fqn)

    def read(self, name: str, box: Box) -> Tensor:
        """Return the box, in the dtype it was saved in."""
        return self.read_key(model_key(self.manifest.state[name][0]), box)

    def read_key(self, key: str, box: Box) -> Tensor:
        """Return a box of anything that is stored, by its name there."""
        found = self.stored.metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        tensor = torch.empty(sizes(box), dtype=found.properties.dtype)
        self.stored.read([Target(key, box, tensor)])
        return tensor


def open_source(path: Path, *, is_checked: bool = False) -> MappedSource | CheckpointSource:
    """Return what a path holds; of a folder of checkpoints, the newest whole one.

    A checkpoint that `is_checked` is taken for whole. Raises PlanError where it holds nothing of
    these kinds, or is damaged.
    """
    if not path.exists():
        raise PlanError(f"{path} does not exist; give a checkpoint, safetensors or a .pt file")
    if path.is_file():
        if path.suffix == ".safetensors":
            return MappedSource(read_file(path))
        if path.suffix in STATE_DICT_SUFFIXES:
            return MappedSource(*_state_dict(path))
        raise PlanError(
            f"{path} has none of the suffixes .safetensors, {', '.join(STATE_DICT_SUFFIXES)}; "
            "rename it to what it is"
        )
    if (path / INDEX).is_file() or (path / SINGLE).is_file():
        return MappedSource(read_folder(path))
    if folders.is_checkpoint(path):
        return CheckpointSource(path, is_checked=is_checked)
    return _newest(folders.checkpoints_in(path))


def _newest(found: Sequence[Path]) -> CheckpointSource:
    for checkpoint in found[:-1]:
        try:
            return CheckpointSource(checkpoint)
        except PlanError:
            continue
    return CheckpointSource(found[-1])


def _state_dict(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        brief = str(error).splitlines()[0]
        raise PlanError(f"{path} can't be read as a state_dict ({brief}); save it again") from None
    found, optimizer = split_training(found)
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise PlanError(
            f"{path} is no state_dict of a model: it holds other things than tensors; save "
            'model.state_dict(), or {"model": ..., "optimizer": ...} of both state dicts'
        )
    return found, optimizer


def fill(parts: Iterable[Part], aliases: Mapping[str, Sequence[str]], source: Source) -> list[Part]:
    """Fill the first tensor of each part from a source; return the parts that it does not have.

    `aliases` gives the other names of tied tensors. Raises PlanError for another shape.
    """
    missing = []
    for part in parts:
        fqn = part.holding.meta.fqn
        name = next((n for n in (fqn, *aliases.get(fqn, ())) if n in source.tensors), None)
        if name is None:
            missing.append(part)
            continue
        known = source.tensors[name]
        if known.shape != part.piece.shape:
            raise PlanError(
                f"{name} has shape {known.shape} there and {part.piece.shape} in the model; load "
                "weights of this model"
            )
        for _, chunk in part.chunks():
            local = tuple(slice(start, stop) for start, stop in chunk.local)
            part.tensors[0][local].copy_(source.read(name, chunk.box))
    return missing

"""How parts go to files and come back: planners and a writer for torch.distributed.checkpoint.

The files are those of `torch.distributed.checkpoint.FileSystemWriter`, and its reader and PyTorch's
own tools take them. The writer here differs in two things: it holds one chunk at a time, and it
computes a file's checksum while it writes, so that nothing is read again.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from planner.errors import PlanError
from planner.language.layout.boxes import Box, Shape, box_numel, sizes, slices
from planner.runtime.checkpoint.parts import Part

NOTES = "planner.notes"
"""The stored item that is no tensor: step, random states, param groups and what else is small."""

_READ_BYTES = 2**24


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return a box as torch.distributed.checkpoint has it."""
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(sizes(box)))


def tensor_item(key: str, shape: Shape, dtype: torch.dtype, box: Box) -> WriteItem:
    """Return the order to write a box of a tensor."""
    chunk = chunk_metadata(box)
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape)),
    )


def bytes_item(key: str, data: bytes) -> WriteItem:
    """Return the order to write bytes."""
    return WriteItem(
        index=MetadataIndex(key),
        type=WriteItemType.BYTE_IO,
        bytes_io_data=BytesIOWriteData(len(data)),
    )


class WritePlanner(SavePlanner):
    """Writes items whose data `resolve` gives, when each is written."""

    def __init__(
        self, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Tensor | io.BytesIO]
    ) -> None:
        self._items, self._resolve = list(items), resolve

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the items are known."""

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Put the ranks' items together; boxes that overlap or are missing are our mistake."""
        plans, metadata = create_default_global_save_plan(all_plans)
        # A plan beside ours makes it check that the boxes fill each tensor, which it leaves out
        # for a single rank.
        wrong = _validate_global_plan([*plans, SavePlan([])], metadata)
        assert not wrong, wrong
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return an item's data."""
        return self._resolve(write_item)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a box of a stored tensor goes: a tensor of the box's sizes."""

    key: str
    box: Box
    tensor: Tensor


def targets_of(part: Part, stored: Metadata) -> Iterator[Target]:
    """Yield where to read a part from, into the first of its tensors.

    Raises PlanError for a tensor that is not stored, or has another shape.
    """
    if 0 in part.piece.shape:  # nothing is to be read of what has no elements
        return
    stored_tensor(stored, part)
    held = tuple((0, size) for size in part.tensors[0].shape)
    for _, chunk in part.chunks():
        yield Target(_key(stored, part), chunk.box, part.tensors[0][slices(chunk.local, held)])


class ReadPlanner(LoadPlanner):
    """Fills tensors with boxes of what is stored, however that is cut.

    Raises PlanError for a box that is not stored in full.
    """

    def __init__(self, targets: Iterable[Target], stored: Metadata) -> None:
        self._tensors: list[Tensor] = []
        self._items: list[ReadItem] = []
        for target in targets:
            found = stored.state_dict_metadata[target.key]
            assert isinstance(found, TensorStorageMetadata)
            items = create_read_items_for_chunk_list(
                target.key, found, [chunk_metadata(target.box)]
            )
            # Stored boxes do not overlap (checked when they were written), so equal counts mean
            # full cover.
            if sum(item.lengths.numel() for item in items) != box_numel(target.box):
                raise PlanError(f"{target.key} is stored in part only; use another checkpoint")
            # Each target has an index of its own: two may be of one box.
            index = MetadataIndex(target.key, index=len(self._tensors))
            self._items += [replace(item, dest_index=index) for item in items]
            self._tensors.append(target.tensor)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the items are known."""

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans: each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Not called: only tensors are read."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a local tensor that an item fills."""
        number = read_item.dest_index.index
        assert number is not None
        target = self._tensors[number]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the data is in its place."""


def _key(stored: Metadata, part: Part) -> str:
    return part.key if part.key in stored.state_dict_metadata else part.fallback or part.key


def stored_tensor(stored: Metadata, part: Part) -> TensorStorageMetadata:
    """Return what is stored of a part's tensor. Raises PlanError where that does not fit."""
    key = _key(stored, part)
    found = stored.state_dict_metadata.get(key)
    name = part.holding.meta.fqn
    if not isinstance(found, TensorStorageMetadata):
        raise PlanError(f"the checkpoint has no {key}; load a checkpoint of the model with {name}")
    if tuple(found.size) != part.piece.shape:
        raise PlanError(
            f"{key} has shape {tuple(found.size)} in the checkpoint and {part.piece.shape} in "
            f"the model; load a checkpoint of this model"
        )
    return found


class StreamWriter(FileSystemWriter):
    """Writes a rank's items one after the other into one file. Mutable: `checksums`.

    `checksums` has, for each file written, its size in bytes and its CRC-32: it finds any flipped
    bit and any burst of 32, and costs a sixth of SHA-256, which would also find intent.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.checksums: dict[str, tuple[int, int]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; the file is on the disk when this returns."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with open(Path(self.path) / name, "wb") as file, _without_zip_checksums():
            stream = _Summed(file)
            for item in plan.items:
                start = stream.position
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    torch.save(_alone(data), stream)  # type: ignore[arg-type]
                length = stream.position - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        self.checksums[name] = stream.position, stream.checksum
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Let PyTorch write tensors without checksums of its own, which take half of the time.

    The file has one, of all of its bytes; `torch.load` reads neither.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Summed:
    """A file that is written from its start to its end, and the checksum of what is."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.position, self.checksum = 0, 0

    def write(self, data: Any) -> int:
        self.checksum = crc32(data, self.checksum)
        written = self._file.write(data)
        self.position += written
        return written

    def flush(self) -> None:
        self._file.flush()


def _alone(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own: PyTorch stores all of one, however little is used."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def file_checksum(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes and its CRC-32."""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            size += len(data)
            checksum = crc32(data, checksum)
    return size, checksum


class Stored:
    """What is in a checkpoint's folder, item by item, for processes that read alone."""

    def __init__(self, folder: Path) -> None:
        self.reader = FileSystemReader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def read(self, targets: Iterable[Target]) -> None:
        """Fill tensors."""
        planner = ReadPlanner(targets, self.metadata)
        self.reader.read_data(planner.create_local_plan(), planner)

    def notes(self) -> Any:
        """Return the stored item that is no tensor. It is unpickled: it can run code."""
        index = MetadataIndex(NOTES)
        empty = torch.Size([0])
        item = ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty)
        found = _Bytes()
        self.reader.read_data(LoadPlan([item]), found)
        return torch.load(found.value, map_location="cpu", weights_only=False)


class _Bytes(ReadPlanner):
    def __init__(self) -> None:
        super().__init__((), Metadata({}))
        self.value = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = value

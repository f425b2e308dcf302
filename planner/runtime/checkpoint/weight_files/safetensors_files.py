"""Safetensors, read by slices and written as a stream; names and shards as Hugging Face has them.

A file is eight bytes (the length of the header), a header in JSON (dtype, shape and place of
each tensor), and the tensors one after the other. Files are mapped into memory: what is read of a
tensor is what is looked at. A writer computes the header first and then holds one tensor at a
time. (The format is described at https://github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from planner.errors import PlanError
from planner.files import replacing, write_atomically
from planner.language.layout.boxes import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor to write: `read` gives its values when they are due."""

    name: str
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file as views of mapped memory.

    Raises PlanError for a file that is not safetensors, or is damaged.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        try:
            if size < start:
                raise ValueError(f"{size} bytes, and its header alone has {length}")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            places = {
                name: (_DTYPES[found["dtype"]], tuple(found["shape"]), found["data_offsets"])
                for name, found in header.items()
            }
            for dtype, shape, (first, last) in places.values():
                if last - first != prod(shape) * dtype.itemsize or start + last > size:
                    raise ValueError(f"it has {size} bytes, and its header tells of others")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{path} is not safetensors, or is damaged ({error}); copy it again"
            ) from None
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, (dtype, shape, (first, last)) in places.items():
        data = mapped[start + first : start + last]
        if (start + first) % dtype.itemsize:
            data = data.clone()  # not every writer aligns
        found[name] = data.view(dtype).view(shape)
    return found


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's shards, or of its single file, as `read_file` does."""
    index = folder / INDEX
    if not index.is_file():
        return read_file(folder / SINGLE)
    try:
        shards = json.loads(index.read_text())["weight_map"]
        files = {name: read_file(folder / name) for name in sorted(set(shards.values()))}
        return {name: files[shard][name] for name, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{index} does not go with its shards ({error}); copy them again") from None


def write_file(path: Path, tensors: Iterable[Named]) -> None:
    """Write a file, one tensor at a time. Raises PlanError for a dtype that the format has not."""
    # Wide elements first, so that all are aligned.
    tensors = sorted(tensors, key=lambda each: (-each.dtype.itemsize, each.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for each in tensors:
        if each.dtype not in _NAMES:
            raise PlanError(
                f"{each.name} is {each.dtype}, which safetensors do not have; write a .pt file"
            )
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [at, at + each.nbytes],
        }
        at += each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as scratch, open(scratch, "wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for each in tensors:
            data = each.read().to(each.dtype).contiguous()
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_folder(folder: Path, tensors: Sequence[Named], shard_bytes: int) -> None:
    """Write shards of at most `shard_bytes` (if no tensor has more) and their index.

    Tensors stay in order. What is not larger than a shard is a single file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) <= 1:
        write_file(folder / SINGLE, tensors)
        return
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        placed |= dict.fromkeys((each.name for each in shard), name)
    total = sum(each.nbytes for each in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[Named], shard_bytes: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    filled = 0
    for each in tensors:
        if shard and filled + each.nbytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(each)
        filled += each.nbytes
    if shard:
        yield shard

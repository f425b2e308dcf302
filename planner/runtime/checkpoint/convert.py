"""From one kind of file to another, offline: checkpoint, safetensors, single-device state dict.

Everything is read and written tensor by tensor, or chunk by chunk, in one process: it needs the
memory of the largest tensor, whatever the model's size. Between checkpoints all of the training
is carried; other kinds hold the model alone.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from planner.errors import PlanError
from planner.files import replacing
from planner.language.graph import ModelGraph
from planner.language.layout.boxes import Box, Shape
from planner.language.layout.pieces import Piece
from planner.language.lowering.holdings import Holdings, model_key
from planner.language.plan import Plan
from planner.runtime.checkpoint import folder as folders
from planner.runtime.checkpoint.folder import Manifest
from planner.runtime.checkpoint.optimizer_state import OptimizerNotes
from planner.runtime.checkpoint.parts import dtype_name
from planner.runtime.checkpoint.snapshot import Notes, versions
from planner.runtime.checkpoint.storage import (
    NOTES,
    StreamWriter,
    WritePlanner,
    bytes_item,
    file_checksum,
    tensor_item,
)
from planner.runtime.checkpoint.weight_files.config import (
    is_pretrained,
    refuse_other_weights,
    write_config,
)
from planner.runtime.checkpoint.weight_files.safetensors_files import (
    Named,
    read_file,
    write_file,
    write_folder,
)
from planner.runtime.checkpoint.weight_files.single_device import (
    as_training,
    count_steps,
    from_state_dict,
    to_state_dict,
)
from planner.runtime.checkpoint.weight_files.sources import (
    STATE_DICT_SUFFIXES,
    CheckpointSource,
    MappedSource,
    open_source,
)

Progress = Callable[[float, str], None]
"""Called with the fraction done (0..1) and what is being done."""

Kind = Literal["checkpoint", "safetensors", "state-dict", "training"]
"""What a conversion writes."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written: which kind, where, from where, and how much of what."""

    kind: Kind
    path: Path
    source: Path
    num_tensors: int
    nbytes: int
    has_config: bool = False
    """Whether `config.json` of a Hugging Face model is beside it."""


def kind_of(
    source: MappedSource | CheckpointSource,
    target: Path,
    wanted: str | None,
    *,
    has_plan: bool = False,
) -> Kind:
    """Return what to write: as the target's suffix says; a folder is what the source is not, or
    a checkpoint, which alone a plan cuts.

    Raises PlanError for an unknown kind, or one that the suffix speaks against.
    """
    by_suffix: Kind | None = None
    if target.suffix == ".safetensors":
        by_suffix = "safetensors"
    elif target.suffix in STATE_DICT_SUFFIXES:
        by_suffix = "state-dict"
    kinds: tuple[Kind, ...] = ("checkpoint", "safetensors", "state-dict", "training")
    for kind in kinds:
        if wanted == kind:
            suffix: Kind = "state-dict" if kind == "training" else kind
            if (by_suffix or suffix) != suffix or (suffix == "state-dict" and by_suffix is None):
                raise PlanError(
                    f"{target} can't be a {kind}; a state-dict and a training end in .pt, a single "
                    "file of safetensors in .safetensors, and a folder in neither"
                )
            return kind
    if wanted is not None:
        raise PlanError(f"kind {wanted!r} is unknown; a conversion makes {', '.join(kinds)}")
    if by_suffix is not None:
        return by_suffix
    is_checkpoint = isinstance(source, CheckpointSource)
    return "safetensors" if is_checkpoint and not has_plan else "checkpoint"


def convert(
    source: Path,
    target: Path,
    *,
    kind: str | None = None,
    plan: Plan | None = None,
    graph: ModelGraph | None = None,
    model: nn.Module | None = None,
    shard_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> Converted:
    """Convert `source` to `target`; with a `plan` a checkpoint is cut as its ranks would write it.

    A checkpoint is added to the folder `target`, as `Engine.save` does; others must not exist yet.
    A folder of safetensors of a Hugging Face `model` gets the model's config, too.
    Raises PlanError where the source is damaged, or of another model than the plan's `graph` or
    `model`.
    """
    found = open_source(source)
    chosen = kind_of(found, target, kind, has_plan=plan is not None)
    if plan is not None and chosen != "checkpoint":
        raise PlanError(f"a plan cuts a checkpoint, and {target} becomes {chosen}; leave it out")
    report = progress or _say_nothing
    if chosen == "checkpoint":
        path, keys = _to_checkpoint(found, target, plan, graph, report)
        return Converted(
            kind=chosen,
            path=path,
            source=found.path if isinstance(found, CheckpointSource) else source,
            num_tensors=len(keys),
            nbytes=sum(each.nbytes for each in keys),
        )
    if model is not None and not _is_folder(chosen, target):
        raise PlanError(
            f"`model` gives a folder of safetensors its config, and {target} becomes a file; name "
            "a folder, or leave the model out"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise PlanError(f"{target} exists; name a file or folder that does not")
    named = list(_named(found, chosen, report))
    if chosen == "training":
        named += _optimizer_tensors(found)
    if model is not None:
        refuse_other_weights(named, model, source)
    _write_weights(named, found, target, chosen, shard_bytes)
    pretrained = model if model is not None and is_pretrained(model) else None
    if pretrained is not None:
        write_config(target, pretrained)
    return Converted(
        kind=chosen,
        path=target,
        has_config=pretrained is not None,
        source=found.path if isinstance(found, CheckpointSource) else source,
        num_tensors=len(named),
        nbytes=sum(each.nbytes for each in named),
    )


# -- weights ----------------------------------------------------------------------------------


def _named(
    source: MappedSource | CheckpointSource, kind: Kind, progress: Progress
) -> Iterator[Named]:
    """Yield each tensor once: of tied ones the first, as Hugging Face stores them."""
    kept: set[str] = set()
    wanted = {}
    for name, known in source.tensors.items():
        if known.same not in kept:
            kept.add(known.same)
            wanted[name] = known
    for number, (name, known) in enumerate(wanted.items()):

        def read(name: str = name, shape: Shape = known.shape, number: int = number) -> Tensor:
            progress(number / len(wanted), name)
            return source.read(name, _all(shape))

        yield Named(name, known.shape, known.dtype, read)


def _same_names(source: MappedSource | CheckpointSource) -> dict[str, str]:
    """For each name the first of those with the same values."""
    first: dict[str, str] = {}
    return {name: first.setdefault(known.same, name) for name, known in source.tensors.items()}


def _optimizer_tensors(source: MappedSource | CheckpointSource) -> list[Named]:
    """The optimizer's, by their names in a checkpoint."""
    if not isinstance(source, CheckpointSource):
        raise PlanError("a training is written of a checkpoint; other sources have it or lack it")
    stored = source.stored.metadata.state_dict_metadata
    return [
        Named(
            key,
            tuple(known.size),
            known.properties.dtype,
            partial(source.read_key, key, _all(tuple(known.size))),
        )
        for key, known in stored.items()
        if key.startswith("optim.") and isinstance(known, TensorStorageMetadata)
    ]


def _write_weights(
    named: list[Named],
    source: MappedSource | CheckpointSource,
    target: Path,
    kind: Kind,
    shard_bytes: int,
) -> None:
    same = _same_names(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    if _is_folder(kind, target):
        write_folder(target, named, shard_bytes)
        return
    with (
        replacing(target) as finished,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch,
    ):
        written = Path(scratch) / "model.safetensors"
        write_file(written, named)
        if kind != "safetensors":
            # PyTorch writes storages from memory: mapped, they are in the file's pages only.
            mapped = read_file(written)
            written = Path(scratch) / "model.pt"
            model = {name: mapped[first] for name, first in same.items()}
            if kind == "training":
                assert isinstance(source, CheckpointSource), "it was refused"
                notes = source.stored.notes().optimizer
                state = to_state_dict(notes, list(same), mapped, mapped.__getitem__)
                torch.save(as_training(model, state), written)
            else:
                torch.save(model, written)
        os.replace(written, finished)


def _is_folder(kind: Kind, target: Path) -> bool:
    """Whether a target is a folder of safetensors."""
    return kind == "safetensors" and target.suffix != ".safetensors"


# -- checkpoints ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor on its way from checkpoint or weights to a checkpoint."""

    key: str
    shape: Shape
    dtype: torch.dtype
    name: str
    """In the source."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _to_checkpoint(
    source: MappedSource | CheckpointSource,
    target: Path,
    plan: Plan | None,
    graph: ModelGraph | None,
    progress: Progress,
) -> tuple[Path, list[_Stored]]:
    if isinstance(source, CheckpointSource):
        notes, manifest = source.stored.notes(), source.manifest
        tensors = [
            _Stored(key, tuple(known.size), known.properties.dtype, key)
            for key, known in source.stored.metadata.state_dict_metadata.items()
            if isinstance(known, TensorStorageMetadata)
        ]
        read: Callable[[str, Box], Tensor] = source.read_key
    else:
        # The first of tied names is the one that is stored, as `Engine` names them.
        same = _same_names(source)
        optimizer, states = OptimizerNotes(), dict[str, Tensor]()
        if source.optimizer is not None:
            model = {n: source.whole(n) for n, first in same.items() if n == first}
            optimizer, states = from_state_dict(source.optimizer, model)
        notes = Notes(count_steps(optimizer), 0, optimizer)
        manifest = Manifest(
            step=notes.step,
            samples=0,
            precision="model",
            ranks="",
            model="",
            fingerprint="",
            state={
                name: (same[name], dtype_name(known.dtype))
                for name, known in source.tensors.items()
            },
        )
        tensors = [
            _Stored(model_key(name), known.shape, known.dtype, name)
            for name, known in source.tensors.items()
            if same[name] == name
        ]
        tensors += [_Stored(key, tuple(t.shape), t.dtype, key) for key, t in states.items()]

        def read_either(name: str, box: Box) -> Tensor:
            if name in states:
                return states[name][tuple(slice(start, stop) for start, stop in box)]
            return source.read(name, box)

        read = read_either

    items = _items_by_rank(tensors, plan, graph)
    by_key = {each.key: each for each in tensors}
    total = sum(map(len, items)) or 1
    done = 0
    stream = io.BytesIO()
    torch.save(notes, stream)
    items[0].append(bytes_item(NOTES, stream.getvalue()))

    def resolve(item: WriteItem) -> Tensor | io.BytesIO:
        nonlocal done
        if item.tensor_data is None:
            return stream
        progress(done / total, item.index.fqn)
        done += 1
        chunk = item.tensor_data.chunk
        box = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return read(by_key[item.index.fqn].name, box)

    scratch = folders.begin(target)
    writer = StreamWriter(scratch)
    planner = WritePlanner((), resolve)
    plans, metadata = planner.create_global_plan([SavePlan(each) for each in items])
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(each, planner).value() for each in plans])
    files = {**writer.checksums, ".metadata": file_checksum(scratch / ".metadata")}
    manifest = replace(manifest, files=files, versions=versions())
    return folders.commit(scratch, manifest), tensors


def _items_by_rank(
    tensors: list[_Stored], plan: Plan | None, graph: ModelGraph | None
) -> list[list[WriteItem]]:
    """Return what each rank of a plan would write; a single one without a plan."""
    items: list[list[WriteItem]] = [[] for _ in range(1 if plan is None else plan.world_size)]
    left = {each.key: each for each in tensors}
    if plan is not None:
        assert graph is not None, "a plan's pieces are those of its model's graph"
        by_fqn: dict[str, list[_Stored]] = {}
        for each in tensors:
            by_fqn.setdefault(_fqn(each.key), []).append(each)
        holdings = Holdings(graph, plan)
        for rank in range(plan.world_size):
            for held in holdings.of(rank).values():
                for each in by_fqn.get(held.meta.fqn, ()):
                    # What replicas move each for itself is stored whole, replica by replica.
                    if each.shape != held.piece.shape or held.replica is not None:
                        continue
                    left.pop(each.key, None)
                    for at, chunk in enumerate(held.piece.chunks(each.dtype.itemsize)):
                        if held.writes(each.key, at):
                            items[rank].append(_item(each, chunk.box))
    for each in left.values():
        for chunk in Piece.whole(each.shape).chunks(each.dtype.itemsize):
            items[0].append(_item(each, chunk.box))
    return items


def _fqn(key: str) -> str:
    """The parameter or buffer that a stored tensor belongs to; of a replica's own, none."""
    kind, _, rest = key.partition(".")
    return {"model": rest, "average": rest, "optim": rest.partition(".")[2]}.get(kind, "")


def _item(each: _Stored, box: Box) -> WriteItem:
    return tensor_item(each.key, each.shape, each.dtype, box)


def _all(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def _say_nothing(fraction: float, doing: str) -> None:
    del fraction, doing

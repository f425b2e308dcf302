"""Saving an engine beside its training, and loading one: what `Engine.save` and `load` do."""

from __future__ import annotations

import gc
import io
import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from planner.errors import PlanError
from planner.runtime.checkpoint import folder as folders
from planner.runtime.checkpoint.folder import Manifest
from planner.runtime.checkpoint.optimizer_state import Assembly
from planner.runtime.checkpoint.parts import (
    Part,
    average_parts,
    dtype_name,
    model_parts,
    optimized_parts,
)
from planner.runtime.checkpoint.snapshot import Notes, check_extra, describe, restore, take
from planner.runtime.checkpoint.staging import Copies, Staging
from planner.runtime.checkpoint.storage import (
    NOTES,
    ReadPlanner,
    Stored,
    StreamWriter,
    WritePlanner,
    bytes_item,
    file_checksum,
    stored_tensor,
    targets_of,
    tensor_item,
)
from planner.runtime.checkpoint.together import told_plainly
from planner.runtime.checkpoint.training import Loaded
from planner.runtime.checkpoint.weight_files.sources import CheckpointSource, fill, open_source
from planner.runtime.process import device as devices
from planner.runtime.process.groups.together import together
from planner.runtime.stage.compiled.sizes import OWN_SIZES
from planner.runtime.state.optimizers.optimizer import OWN_SCALER, OWN_SCHEDULER
from planner.runtime.state.rank_state import RankState


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged and the one before it was taken, or values were rounded."""


class Checkpoints:
    """The checkpoints of one state. Mutable: a save under way, host memory for it, a group, and on
    rank 0 `saved`, the name of the last checkpoint written.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._staging = Staging(state.mesh.device)
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._copies: Copies | None = None
        self._failure: BaseException | None = None
        self.saved = ""

    def close(self) -> None:
        """Wait for a save under way, and leave the folders to other engines."""
        self.wait()
        _release(self)

    def save(self, folder: Path, *, keep: int, extra: Mapping[str, Any]) -> None:
        """Begin to save; every rank calls it after the same step. See `Engine.save`."""
        if keep < 1:
            raise PlanError(f"keep={keep} must be at least 1: the checkpoint just written")
        self.wait()
        _claim(folder, self)
        if self._group is None:
            # Its own: its messages go beside those of the training.
            self._group = self._state.mesh.open_host_group()
        # Shards, not gathered weights, are what a rank writes.
        self._state.rest()
        parts, notes = take(self._state, extra)
        items, sources = _to_write(parts)
        self._copies = self._staging.begin(sources)
        write = partial(
            self._write, folder, keep, items, self._copies, notes, describe(self._state)
        )
        # Not a daemon: a script that ends waits for it, as `planner launch` does.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def hold(self) -> None:
        """Let weights and optimizer state change only after they were copied."""
        if self._copies is not None:
            self._copies.hold()
            self._copies = None

    def wait(self) -> None:
        """Return when no save is under way. Raises what the last one failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, write: partial[None]) -> None:
        try:
            devices.prepare(self._state.mesh.device)
            write()
        except BaseException as error:  # told in training's thread
            self._failure = error

    def _write(
        self,
        folder: Path,
        keep: int,
        items: Sequence[WriteItem],
        copies: Copies,
        notes: Notes,
        manifest: Manifest,
    ) -> None:
        group, is_first = self._group, dist.get_rank() == 0
        # Each `together` is also a barrier: no rank writes before all have copied, and a failure on
        # one rank ends the save on all.
        together(group, copies.finish)
        scratch = together(group, lambda: folders.begin(folder) if is_first else None)[0]
        assert scratch is not None
        # (What the script gave may be large, and is alike on all ranks: rank 0's is stored.)
        small = replace(notes, extra={}, optimizer=notes.optimizer.on_cpu())
        merged = _merge(together(group, lambda: small))
        merged.extra = notes.extra
        writer = StreamWriter(scratch)
        data: dict[MetadataIndex, Tensor | io.BytesIO] = {
            item.index: tensor for item, tensor in zip(items, copies.tensors, strict=True)
        }
        own = list(items)
        if is_first:
            stream = io.BytesIO()
            torch.save(merged, stream)
            own.append(bytes_item(NOTES, stream.getvalue()))
            data[MetadataIndex(NOTES)] = stream

        def resolve(item: WriteItem) -> Tensor | io.BytesIO:
            # (The index has got a hint of its place among all.)
            return data[replace(item.index, index=None)]

        def write() -> None:
            planner = WritePlanner(own, resolve)
            with told_plainly():
                dcp.save({}, storage_writer=writer, planner=planner, process_group=group)

        together(group, write)
        # Rank 0's manifest has the files of all ranks.
        checksums = together(group, lambda: writer.checksums)

        def commit() -> None:
            if is_first:
                # All ranks' files are on the disk by now. The rename in `commit` makes them a
                # checkpoint, so a crash before it leaves none that is half written.
                files = {name: found for each in checksums for name, found in each.items()}
                files[".metadata"] = file_checksum(scratch / ".metadata")
                self.saved = folders.commit(scratch, replace(manifest, files=files)).name
                folders.keep_newest(folder, keep)

        together(group, commit)

    # -- loading ------------------------------------------------------------------------

    def load(self, path: Path, *, extra: Mapping[str, Any]) -> Loaded:
        """Load a checkpoint, or the newest whole one in a folder. See `Engine.load`."""
        state, control = self._state, self._state.mesh.control
        self.wait()
        state.rest()
        found = together(control, lambda: _candidates(path) if dist.get_rank() == 0 else None)[0]
        assert found is not None
        checkpoint = self._first_whole(found, is_named=folders.is_checkpoint(path))

        def read() -> tuple[Manifest, Notes, Metadata]:
            stored = Stored(checkpoint)
            return folders.read_manifest(checkpoint), stored.notes(), stored.metadata

        manifest, notes, metadata = _of_own(control, read)
        if not notes.step:  # weights to begin from: the engine's schedules begin, too
            extra = {n: v for n, v in extra.items() if not n.startswith(OWN_SCHEDULER)}
        if OWN_SCALER not in notes.extra:  # saved under another precision: the scale begins
            extra = {n: v for n, v in extra.items() if n != OWN_SCALER}
        if OWN_SIZES not in notes.extra:  # saved with eager kernels
            extra = {n: v for n, v in extra.items() if n != OWN_SIZES}
        _of_own(control, lambda: check_extra(extra, notes))
        # Targets are found on all ranks before any tensor is overwritten: a misfit leaves the
        # training as it was.
        parts, assembly = _of_own(control, lambda: self._targets(notes, metadata))
        planner = _of_own(
            control,
            lambda: ReadPlanner(
                (t for part in parts for t in targets_of(part, metadata)), metadata
            ),
        )
        reader = Stored(checkpoint).reader
        if state.averages is not None:
            state.averages.begin_anew()  # where the checkpoint has none
        with told_plainly():
            dcp.load({}, storage_reader=reader, planner=planner, process_group=control)
        finish_parts(state, parts)
        if assembly is not None:
            assembly.finish()
        casts = self._casts(parts, metadata, manifest)
        restore(state, notes, extra)
        _take_over(checkpoint.parent, self)
        return Loaded(path=checkpoint, step=notes.step, samples=notes.samples, casts=casts)

    def load_weights(self, path: Path) -> None:
        """Take the model's values alone. See `Engine.load_weights`."""
        state, control = self._state, self._state.mesh.control
        self.wait()
        state.rest()

        def choose() -> Path | None:
            source = open_source(path) if dist.get_rank() == 0 else None
            return source.path if isinstance(source, CheckpointSource) else path

        chosen = together(control, choose)[0]
        assert chosen is not None
        parts = model_parts(state)

        def read() -> None:
            source = open_source(chosen, is_checked=True)
            aliases = {meta.fqn: meta.aliases for meta in state.graph.tensors}
            with torch.no_grad():
                missing = fill(parts, aliases, source)
            needed = [
                part.holding.meta
                for part in missing
                if part.holding.meta.kind == "param" or state.is_empty(part.holding.meta.fqn)
            ]
            params = [meta for meta in needed if meta.kind == "param"]
            if params:
                raise PlanError(
                    f"{path} has no {params[0].fqn}, nor {len(params) - 1} others of the model; "
                    "give weights of this model, with the names of its state dict"
                )
            if needed:
                raise PlanError(
                    f"{path} has no {needed[0].fqn}, a buffer that the model has on the meta "
                    "device, without values; build buffers on the CPU, as "
                    "accelerate.init_empty_weights() does"
                )

        together(control, read)
        finish_parts(state, parts)

    def _first_whole(self, found: Sequence[Path], *, is_named: bool) -> Path:
        """Return the first checkpoint without damage; ranks deal the files to check."""
        control, rank = self._state.mesh.control, dist.get_rank()
        for number, checkpoint in enumerate(found):

            def check(checkpoint: Path = checkpoint) -> str:
                try:
                    files = sorted(folders.read_manifest(checkpoint).files.items())
                except PlanError as error:
                    # What to do is told below, once.
                    return str(error).removesuffix("; use another checkpoint")
                # Every rank checks its share of the files, so the whole folder is read once.
                own = files[rank :: dist.get_world_size()]
                return folders.what_is_wrong(checkpoint, own, file_checksum)

            wrong = next(filter(None, together(control, check)), "")
            if not wrong:
                return checkpoint
            if is_named:
                raise PlanError(f"{checkpoint}: {wrong}; load another checkpoint")
            if number + 1 == len(found):
                raise PlanError(f"{checkpoint}: {wrong}; no other checkpoint is whole")
            if rank == 0:
                warnings.warn(
                    CheckpointWarning(f"{checkpoint}: {wrong}; taking the checkpoint before it"),
                    stacklevel=4,
                )
        raise AssertionError("a folder without checkpoints was refused")

    def _targets(self, notes: Notes, metadata: Metadata) -> tuple[list[Part], Assembly | None]:
        state = self._state
        parts = [
            part
            for part in model_parts(state)
            # A buffer outside the state dict was stored if steps move it; else the model has it.
            if part.holding.meta.fqn in state.outside.dtypes
            or part.holding.meta.kind == "param"
            or part.key in metadata.state_dict_metadata
        ]
        averages = [
            part
            for part in average_parts(state, parts)
            if part.fallback or part.key in metadata.state_dict_metadata
        ]
        if state.optimizer is None:
            return parts + averages, None
        params, by_fqn = optimized_parts(state, parts)
        assembly = Assembly(state.optimizer, params, by_fqn, notes.optimizer, metadata)
        return parts + averages + assembly.parts, assembly

    def _casts(
        self, parts: Sequence[Part], metadata: Metadata, manifest: Manifest
    ) -> tuple[str, ...]:
        own: dict[tuple[str, str], set[str]] = {}
        for part in parts:
            if 0 in part.piece.shape:
                continue
            saved = stored_tensor(metadata, part).properties.dtype
            here = part.tensors[0].dtype
            if saved != here:
                own.setdefault((dtype_name(saved), dtype_name(here)), set()).add(part.key)
        everywhere: dict[tuple[str, str], set[str]] = {}
        for each in together(self._state.mesh.control, lambda: own):
            for dtypes, keys in each.items():
                everywhere.setdefault(dtypes, set()).update(keys)
        casts = tuple(
            f"{len(keys)} tensors saved in {saved} (precision {manifest.precision!r}) are {here} "
            f"here (precision {self._state.plan.precision!r}), such as {min(keys)}"
            for (saved, here), keys in sorted(everywhere.items())
        )
        if casts and dist.get_rank() == 0:
            warnings.warn(CheckpointWarning("; ".join(casts)), stacklevel=4)
        return casts


_saving: dict[Path, weakref.ref[Checkpoints]] = {}
"""By folder, the checkpoints of the engine of this process that saved there last."""


def _claim(folder: Path, own: Checkpoints) -> None:
    """Raise PlanError where another engine of the script saves to a folder: the newest checkpoint
    there would be of either, and one under way would be swept up as what a crash had left.
    """
    path = Path(os.path.realpath(folder))
    other = _saving.get(path, lambda: None)()
    if other is not None and other is not own:
        del other
        gc.collect()  # an engine that the script has let go may wait for it
        if _saving[path]() is not None:
            raise PlanError(
                f"engine.save({str(folder)!r}): another engine of this script saves there; give "
                "each engine a folder of its own, or save one with the other by extra="
                "{name: engine}"
            )
    _saving[path] = weakref.ref(own)


def _release(own: Checkpoints) -> None:
    """Let others save where a closed engine did: it saves no more."""
    for path, saved_by in list(_saving.items()):
        if saved_by() is own:
            del _saving[path]


def _take_over(folder: Path, own: Checkpoints) -> None:
    """Let an engine that goes on from a checkpoint in a folder be the one that saves there."""
    path = Path(os.path.realpath(folder))
    other = _saving.get(path, lambda: None)()
    if other is not None and other is not own:
        other.wait()
    _saving[path] = weakref.ref(own)


def finish_parts(state: RankState, parts: Sequence[Part]) -> None:
    """Bring what was read to all places that hold the same."""
    with torch.no_grad():
        for part in parts:
            for copy in part.tensors[1:]:
                copy.copy_(part.tensors[0])
    state.take_values()


def _to_write(parts: Sequence[Part]) -> tuple[list[WriteItem], list[Tensor]]:
    """Return the items this rank writes, and the tensors they are of."""
    items, sources = [], []
    for part in parts:
        tensor = part.tensors[0]
        held = tuple((0, size) for size in tensor.shape)
        for chunk in part.written():
            items.append(tensor_item(part.key, part.piece.shape, tensor.dtype, chunk.box))
            source = tensor[tuple(slice(a, b) for a, b in chunk.local)] if held else tensor
            sources.append(source.clone() if part.moves else source)
    return items, sources


def _merge(all_notes: Sequence[Notes]) -> Notes:
    first, *others = all_notes
    for other in others:
        first.merge(other)
    return first


def _candidates(path: Path) -> list[Path]:
    return [path] if folders.is_checkpoint(path) else folders.checkpoints_in(path)


def _of_own(group: dist.ProcessGroup, work: Any) -> Any:
    """Return what `work` returns here; fail on all ranks where it fails on one."""
    kept = []
    together(group, lambda: kept.append(work()))
    return kept[0]

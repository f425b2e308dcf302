"""Doing again what a recording notes, for some tensors, with values and piece by piece.

A tensor needs a *slice* of the notes: those that its values come from, without what was
overwritten later (the first of two initialisations is drawn and dropped). Draws go on in the
order of the recording, so a tensor is made when its last random op comes; for earlier ones of
the same tensor the generator's state is kept, 5 KB each. A tensor whose slice is elementwise is
made in pieces of whole rows; another one whole, together with what it is made from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from planner.runtime.initial.recording import START, Note, Recording, Ref

PIECE_BYTES = 8 * 2**20
"""Of a tensor that is made in pieces, made at once."""

_NORMAL_STEP = 16
"""normal_ makes elements in groups of 16 of a contiguous tensor, and draws the last 16 elements
again where they are not a whole group (ATen/native/cpu/DistributionTemplates.h, normal_fill).
"""
_BY_ELEMENT = frozenset(["fill_", "zero_", "copy_", "clone", "_to_copy", "uniform_", "normal_"])
_FACTORIES = frozenset(["zeros", "ones", "full", "rand", "randn"])
_BY_ELEMENT_DRAWS = frozenset(["uniform_", "normal_", "rand", "randn"])

Sink = Callable[[int, Tensor], None]
"""Takes rows of a tensor: the first row's number, and their values on the CPU."""


class Replay:
    """Makes tensors of a recording. `slices` gives by name the numbers of the notes of each."""

    def __init__(self, recording: Recording, wanted: Mapping[str, Ref]) -> None:
        """`wanted` are tensors by name."""
        self._recording, self._wanted = recording, dict(wanted)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for at, note in enumerate(recording.notes):
            for storage in note.writes:
                self._writers[storage].append(at)
        self.slices = {name: self._slice(ref) for name, ref in wanted.items()}

    def _slice(self, ref: Ref) -> tuple[int, ...]:
        found: set[int] = set()
        end = len(self._recording.notes)
        pending = [(ref.storage, end)]
        seen: set[tuple[int, int]] = set()
        while pending:
            storage, before = pending.pop()
            # Back from the last write to that which leaves nothing of what was before.
            for at in reversed(self._writers[storage]):
                if at >= before:
                    continue
                # Followed from here already, all that was written before included.
                if (storage, at) in seen:
                    break
                seen.add((storage, at))
                note = self._recording.notes[at]
                found.add(at)
                pending += [(read, at) for read in note.reads]
                if storage in note.covers:
                    break
        return tuple(sorted(found))

    def origin(self, name: str) -> str:
        """Say what makes a tensor's values, such as ``normal_(0.0, 0.02)``; "" where nothing."""
        notes = [str(self._recording.notes[at]) for at in self.slices[name]]
        if not notes and self._wanted[name].storage in self._recording.given:
            return "values"
        return ", ".join(notes)

    def peak_bytes(self) -> int:
        """Return the most host memory that making any of the tensors takes beside their places."""
        return max(map(self._bytes_of, self._wanted), default=0)

    def _bytes_of(self, name: str) -> int:
        notes = [self._recording.notes[at] for at in self.slices[name]]
        storages = {self._wanted[name].storage}.union(*(n.writes | n.reads for n in notes))
        total = sum(self._recording.sizes[storage] for storage in storages)
        return min(total, len(storages) * PIECE_BYTES) if self._in_pieces(name) else total

    def run(self, state: Tensor, sinks: Mapping[str, Sink], *, to_the_end: bool = True) -> Tensor:
        """Make all tensors from a state of the generator; return the state where draws end.

        Without `to_the_end` nothing is drawn that no tensor needs, and the state is returned as
        it was.
        """
        notes = self._recording.notes
        draws = [at for at, note in enumerate(notes) if note.draws]
        # due: tensors to make when a note's draws begin: that of their last random op. uses:
        # tensors that still need the generator's state before a random note.
        due: dict[int, list[str]] = defaultdict(list)
        uses: Counter[int] = Counter()
        for name, own in self.slices.items():
            random = [at for at in own if notes[at].draws]
            due[random[-1] if random else START].append(name)
            uses.update(random)
        # followers: random notes that draw on from the end of a note; its state is kept until the
        # last of them has begun.
        followers = Counter(n.after for n in notes if n.draws and isinstance(n.after, int))
        lasts = [self._recording.last, *(last for _, last in self._recording.others)]
        followers.update(last for last in lasts if isinstance(last, int))
        ends = {START: state}
        begins: dict[int, Tensor] = {}

        def make(name: str) -> dict[int, Tensor]:
            ended = self._make(name, begins, sinks[name])
            for at in ended:
                uses[at] -= 1
                if not uses[at]:
                    del begins[at]
            return ended

        for name in due[START]:
            make(name)
        needed = draws if to_the_end else [at for at in draws if at <= max(uses, default=START)]
        for at in needed:
            after = notes[at].after
            begin = ends[after] if isinstance(after, int) else after
            if isinstance(after, int):
                followers[after] -= 1
                if not followers[after]:
                    del ends[after]
            if uses[at]:
                begins[at] = begin
            reached = None
            for name in due[at]:
                reached = make(name)[at]
            if followers[at]:
                # Where no tensor was made here, the draws are made and dropped: those behind them
                # depend on it.
                ends[at] = self._skip(notes[at], begin) if reached is None else reached
        if not to_the_end:
            return state
        end, *others = (ends[last] if isinstance(last, int) else last for last in lasts)
        for (generator, _), other in zip(self._recording.others, others, strict=True):
            generator.set_state(other)
        return end

    def whole(self, name: str, begins: Mapping[int, Tensor]) -> Tensor:
        """Return a tensor; `begins` gives the generator's state before each random note."""
        made: list[Tensor] = []
        self._make_whole(name, _generators(begins, self.slices[name]), lambda _, t: made.append(t))
        return made[0]

    def _make(self, name: str, begins: Mapping[int, Tensor], sink: Sink) -> dict[int, Tensor]:
        """Make a tensor; return the generator's state after each of its random notes."""
        generators = _generators(begins, self.slices[name])
        if self._in_pieces(name):
            shape = self._wanted[name].shape
            for first, last in _rows(shape, self._wanted[name].dtype.itemsize):
                self._make_rows(name, generators, first, last, sink)
        else:
            self._make_whole(name, generators, sink)
        return {at: generator.get_state() for at, generator in generators.items()}

    def _make_whole(self, name: str, generators: Mapping[int, torch.Generator], sink: Sink) -> None:
        held: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            return self._tensor(leaf, held) if isinstance(leaf, Ref) else leaf

        for at in self.slices[name]:
            note = self._recording.notes[at]
            made = _call(
                note, tree_map(real, note.args), tree_map(real, note.kwargs), generators.get(at)
            )
            for ref, value in zip(note.made, _tensors(made), strict=False):
                if ref is not None:
                    self._tensor(ref, held).copy_(value)
            del made
        sink(0, self._tensor(self._wanted[name], held))

    def _tensor(self, ref: Ref, held: dict[int, torch.UntypedStorage]) -> Tensor:
        if ref.storage not in held:
            given = self._recording.given.get(ref.storage)
            size = self._recording.sizes[ref.storage]
            base = torch.empty(size, dtype=torch.uint8) if given is None else given.clone()
            held[ref.storage] = base.untyped_storage()
        return torch.empty(0, dtype=ref.dtype).set_(
            held[ref.storage], ref.offset, ref.shape, ref.stride
        )

    def _make_rows(
        self,
        name: str,
        generators: Mapping[int, torch.Generator],
        first: int,
        last: int,
        sink: Sink,
    ) -> None:
        held: dict[int, Tensor] = {}
        shape = (last - first, *self._wanted[name].shape[1:])

        def rows(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.storage not in held:
                held[leaf.storage] = torch.empty(shape, dtype=leaf.dtype)
            return held[leaf.storage]

        for at in self.slices[name]:
            note = self._recording.notes[at]
            args = (shape, *note.args[1:]) if note.name in _FACTORIES else note.args
            made = _call(
                note, tree_map(rows, args), tree_map(rows, note.kwargs), generators.get(at)
            )
            for ref, value in zip(note.made, _tensors(made), strict=False):
                if ref is not None:
                    held[ref.storage] = value
        sink(first, held[self._wanted[name].storage])

    def _in_pieces(self, name: str) -> bool:
        target = self._wanted[name]
        notes = [self._recording.notes[at] for at in self.slices[name]]
        if not notes or target.num_bytes <= PIECE_BYTES or len(target.shape) < 1:
            return False
        refs = [target]
        for note in notes:
            if not (note.is_pointwise or note.name in _BY_ELEMENT | _FACTORIES):
                return False
            refs += [r for r in tree_leaves((note.args, note.kwargs)) if isinstance(r, Ref)]
            refs += [ref for ref in note.made if ref is not None]
        # Rows can be made apart only if every tensor of the slice is whole, of the same shape, and
        # no value was given.
        dtypes: dict[int, torch.dtype] = {}
        return all(
            ref.shape == target.shape
            and self._recording.is_whole(ref)
            and ref.storage not in self._recording.given
            and dtypes.setdefault(ref.storage, ref.dtype) == ref.dtype
            for ref in refs
        )

    def _skip(self, note: Note, begin: Tensor) -> Tensor:
        """Draw what a note draws, and drop it; return the generator's state afterwards."""
        generator = torch.Generator()
        generator.set_state(begin)
        refs = [leaf for leaf in tree_leaves((note.args, note.made)) if isinstance(leaf, Ref)]
        filled = refs[0] if refs and note.name in _BY_ELEMENT_DRAWS else None
        if filled is not None and filled.shape and self._recording.is_whole(filled):
            for first, last in _rows(filled.shape, filled.dtype.itemsize):
                rows = torch.empty((last - first, *filled.shape[1:]), dtype=filled.dtype)
                args = (rows, *(a for a in note.args if not isinstance(a, Ref)))
                if note.name in _FACTORIES:
                    args = (tuple(rows.shape), *note.args[1:])
                _call(note, args, note.kwargs, generator)
        else:
            # Zeros: means and probabilities that an op checks.
            args, kwargs = tree_map(_zeros, (note.args, note.kwargs))
            _call(note, args, kwargs, generator)
        return generator.get_state()


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, Ref):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype).zero_()


def _call(note: Note, args: Any, kwargs: Any, generator: torch.Generator | None) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(note.dtype)
    try:
        if generator is None:
            return note.call(*args, **kwargs)
        if _takes_generator(note.call):
            return note.call(*args, **kwargs, generator=generator)
        return _with_default(generator, lambda: note.call(*args, **kwargs))
    finally:
        torch.set_default_dtype(before)


def _takes_generator(call: Any) -> bool:
    if isinstance(call, torch._ops.OpOverload):
        return any(argument.name == "generator" for argument in call._schema.arguments)
    return True  # of `torch.nn.init`


def _with_default(generator: torch.Generator, run: Callable[[], Any]) -> Any:
    """Draw from the default generator, for ops that take no other."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        made = run()
        generator.set_state(torch.default_generator.get_state())
        return made
    finally:
        torch.default_generator.set_state(before)


def _generators(
    begins: Mapping[int, Tensor], slice_: tuple[int, ...]
) -> dict[int, torch.Generator]:
    found = {}
    for at in slice_:
        if at in begins:
            found[at] = torch.Generator()
            found[at].set_state(begins[at])
    return found


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _rows(shape: tuple[int, ...], element_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) rows of pieces: whole groups of `normal_`, but for the last piece."""
    row = prod(shape[1:])
    # The fewest rows whose elements are a multiple of 16.
    group = _NORMAL_STEP // gcd(row, _NORMAL_STEP)
    step = max(1, PIECE_BYTES // max(1, row * element_bytes * group)) * group
    bounds = [*range(0, shape[0], step), shape[0]]
    # The last piece has a whole group at least: draws of fewer elements are made differently.
    if len(bounds) > 2 and (bounds[-1] - bounds[-2]) * row < _NORMAL_STEP:
        del bounds[-2]
    yield from pairwise(bounds)

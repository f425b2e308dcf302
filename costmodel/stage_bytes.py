"""What the jobs of one stage hold: its blocks one after the other, their edges counted once.

A value between two blocks lives while a block still needs it, or keeps it for its backward;
one that is brought to another placement first is copied for the block that takes it so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.backward_walk import Aside, BackwardWalk
from costmodel.block_bytes import BlockBytes
from costmodel.gradients import Gradients


class Copy(NamedTuple):
    """A value brought to another placement: the bytes of the copy, those alive at most while it
    is made, itself counted, and those alive at most beside its gradient while that is brought
    back. `passes_on`: that gradient is the value's, as it is. `is_view`: there is no copy, but
    a part of the value's own memory.
    """

    num_bytes: int
    making_bytes: int
    returning_bytes: int
    passes_on: bool
    is_view: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBlock:
    """A block as its stage calls it: names of its edges and trained parameters in the model,
    and the copies of those inputs that are brought to another placement for it.
    """

    bytes: BlockBytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    copies: tuple[Copy | None, ...]
    params: Mapping[str, str]


class Turn(NamedTuple):
    """A block's part of a job: the bytes alive above the job's start when the block is called,
    at its height and when it has returned; the height outside the block, where its inputs or
    their gradients are brought to other placements; and its parameters whose gradients it made.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    beside_bytes: int = 0
    made: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBytes:
    """A forward job: its height above its start, where what arrived is alive, block by block and
    when all have run; what it keeps of its own, and of the values that others have too or that
    are made of the batch, by name.
    """

    turns: tuple[Turn, ...]
    last_bytes: int
    kept_bytes: int
    kept: Mapping[str, int]

    @property
    def rise_bytes(self) -> int:
        """The job's height."""
        return max([self.last_bytes, *(max(t.peak_bytes, t.beside_bytes) for t in self.turns)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBytes:
    """A backward job: its height above its start, where all that its forward kept and the
    gradients that arrived are alive, and that of each block's turn, the last block's first; the
    gradients it leaves in the parameters; and the weight gradients it puts aside.
    """

    turns: tuple[Turn, ...]
    rise_bytes: int
    left_bytes: int
    aside: tuple[Aside, ...]


@dataclass(frozen=True, kw_only=True)
class StageWalk:
    """A stage's blocks under one choice of recomputation.

    `arriving` are values that other stages send here and `side` those made of the batch for
    every microbatch, with their bytes; `leaving` are sent on, those in `sent_copies` as
    copies in another placement. A gradient's sum is `wide` times as large as its parameter.
    `params_are_dtensors`: what makes them plain tensors runs before a block, so autograd's
    engine takes their gradients on when all else of it has run backward.
    """

    blocks: Sequence[PlacedBlock]
    arriving: Mapping[str, int]
    side: Mapping[str, int]
    leaving: frozenset[str]
    sent_copies: Mapping[str, Copy]
    wide: int = 1
    params_are_dtensors: bool = False

    @cached_property
    def _roots(self) -> dict[str, str]:
        """The value whose memory each edge lies in."""
        root: dict[str, str] = {}
        for block in self.blocks:
            for name in block.inputs:
                root.setdefault(name, name)
            for name, edge in zip(block.outputs, block.bytes.outputs, strict=True):
                copied = edge.viewed is not None and _is_copied(block.copies[edge.viewed])
                is_view = edge.viewed is not None and not copied
                root[name] = root[block.inputs[edge.viewed]] if is_view else name  # type: ignore[index]
        return root

    def _keepers(self, root: Mapping[str, str]) -> dict[str, int]:
        """The first block that keeps each value: the last to let it go."""
        keepers: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            edges = zip(block.inputs, block.bytes.inputs, block.copies, strict=True)
            names = [name for name, edge, copy in edges if edge.is_kept and not _is_copied(copy)]
            names += [
                name
                for name, edge in zip(block.outputs, block.bytes.outputs, strict=True)
                if edge.is_kept
            ]
            for name in names:
                keepers.setdefault(root[name], index)
        return keepers

    @cached_property
    def forward(self) -> ForwardBytes:
        """The forward job of one microbatch."""
        root = self._roots
        keepers = self._keepers(root)
        last = {root[name]: len(self.blocks) for name in self.leaving if name in root}
        for index, block in enumerate(self.blocks):
            for name in (*block.inputs, *block.outputs):
                last[root[name]] = max(last.get(root[name], 0), index)
        alive = dict(self.side)
        live = sum(alive.values())
        own = 0
        turns = []
        for index, block in enumerate(self.blocks):
            start = beside = live
            for copy in block.copies:
                if copy is not None:
                    beside = max(beside, start + copy.making_bytes)
                    start += copy.num_bytes
            peak = start + block.bytes.forward_rise_bytes
            keeps = block.bytes.kept_bytes + _kept_copies(block)
            own += keeps
            live += keeps
            for name, edge in zip(block.outputs, block.bytes.outputs, strict=True):
                if root[name] == name and name not in alive:
                    alive[name] = edge.num_bytes
                    live += edge.num_bytes
            for name in {root[n] for n in (*block.inputs, *block.outputs)}:
                if last[name] == index and name not in keepers:
                    live -= alive.pop(name, 0)
            turns.append(Turn(start, peak, live, beside))
        last_bytes, made = live, live
        for copy in self.sent_copies.values():
            last_bytes = max(last_bytes, made + copy.making_bytes)
            made += copy.num_bytes
        inside = [n for n in alive if n in keepers and n not in self.leaving]
        own += sum(alive.pop(n) for n in inside if n not in self.side)
        kept = {n: size for n, size in alive.items() if n in keepers}
        kept |= {n: size for n, size in self.arriving.items() if n in keepers}
        return ForwardBytes(turns=tuple(turns), last_bytes=last_bytes, kept_bytes=own, kept=kept)

    def backward(
        self,
        received: Mapping[str, int],
        *,
        first: bool,
        num_aside: int = 0,
        flush: bool = False,
        sharded: bool = False,
        staying: frozenset[str] = frozenset(),
    ) -> BackwardBytes:
        """Return a backward job; `received` are the gradients that other stages sent, by value.

        The executor holds those, and what arrived, to the end of the job. In a `first` job
        gradients of parameters stay. The first `num_aside` blocks put their weight gradients
        aside, for another job or, with `flush`, for the end of this one. Where parameters are
        `sharded`, a block's gradients are as wide as those and, once it has made them, not
        counted here (`costmodel.sharded_bytes`). `staying` are values that others keep alive.
        """
        asked = (*received.items(), first, num_aside, flush, sharded, staying)
        if asked not in self._backwards:
            self._backwards[asked] = self._backward(
                received, first=first, num_aside=num_aside, flush=flush, sharded=sharded,
                staying=staying,
            )  # fmt: skip
        return self._backwards[asked]

    @cached_property
    def _backwards(self) -> dict[tuple, BackwardBytes]:
        return {}

    def _backward(
        self,
        received: Mapping[str, int],
        *,
        first: bool,
        num_aside: int,
        flush: bool,
        sharded: bool,
        staying: frozenset[str],
    ) -> BackwardBytes:
        wide = 1 if sharded else self.wide
        stays = first and not sharded
        turns: list[Turn] = []
        let_go: dict[int, list[str]] = {}
        root = self._roots
        keepers = self._keepers(root)
        for name, keeper in keepers.items():
            if name not in self.arriving and name not in staying:
                let_go.setdefault(keeper, []).append(name)
        grads, peak = self._sent_back(received)
        put_aside = {f"gradient {name}" for name in received if name not in self.sent_copies}
        waiting: set[str] = set()
        made: set[str] = set()
        aside: list[Aside] = []
        live = left = 0
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            start = live + grads.live
            height = start + block.bytes.second_rise_bytes
            live += block.bytes.made_again_bytes
            begun = {
                local: name
                for local, name, copy in zip(
                    block.bytes.input_names, block.inputs, block.copies, strict=True
                )
                if name in grads.of and copy is None
            }
            walk = block.bytes.backward(
                first=first,
                held=frozenset(
                    local
                    for local, name in [
                        *zip(block.bytes.output_names, block.outputs, strict=True),
                        *begun.items(),
                    ]
                    if name in grads.of and not grads.is_own(name)
                ),
                begun=frozenset(begun),
                leaves=self._leaves[index],
                split=index < num_aside,
                wide=wide,
                adds_products=not sharded,
                staying=frozenset(
                    local
                    for local, name in zip(block.bytes.output_names, block.outputs, strict=True)
                    if root[name] in staying or root[name] in put_aside
                ),
                going=_going(block, frozenset(let_go.get(index, ())) - put_aside),
                waiting=frozenset(
                    local
                    for local, name in block.params.items()
                    if self.is_shared(name) or (sharded and self.params_are_dtensors)
                ),
            )
            height = max(height, live + grads.live + walk.rise_bytes)
            live -= block.bytes.kept_bytes + block.bytes.made_again_bytes + _kept_copies(block)
            live -= sum(self._sizes[n] for n in let_go.get(index, ()) if n not in put_aside)
            made.update(block.params[param] for param in walk.made)
            for param in walk.made:
                name, size = block.params[param], block.bytes.params[param]
                if not self.is_shared(name):
                    left += wide * size if stays else 0
                    live += wide * size if stays else 0
                    continue
                # One sum of the gradients that all its users make goes to the parameter.
                if name not in waiting:
                    waiting.add(name)
                    live += size
                if index == self._users[name][0]:
                    live -= size
                    left += wide * size if stays else 0
                    live += wide * size if stays else 0
            named = [_named(one, block, index, root) for one in walk.aside]
            for name, size in held_aside(named).items():
                # (What a block before keeps too has not been let go yet.)
                is_there = name in self.arriving or name in staying
                is_there = is_there or name in put_aside or keepers.get(name, index) < index
                live += 0 if is_there else size
                put_aside.add(name)
            aside += named
            beside = live + self._hand_on(block, walk, grads)
            peak = max(peak, height, beside)
            turns.append(Turn(start, height, live + grads.live, beside, walk.made))
        live += grads.live
        aside = [one._replace(is_begun=one.weight in made) for one in aside]
        if flush:
            rise, more = weight_job(aside, first=first, wide=self.wide)
            peak = max(peak, live + rise)
            left += more
            aside = []
        return BackwardBytes(
            turns=tuple(turns), rise_bytes=peak, left_bytes=left, aside=tuple(aside)
        )

    def _sent_back(self, received: Mapping[str, int]) -> tuple[Gradients, int]:
        """Return the gradients of what left, brought back to where its maker left it, and the
        height of that. Those received count nothing here: others hold them.
        """
        grads, peak = Gradients(), 0
        for name in received:
            grads.allocate(name, 0)
            grads.hold(name)
        for name, copy in self.sent_copies.items():
            if name in received:
                peak = max(peak, grads.live + copy.returning_bytes)
                if not copy.passes_on:
                    grads.copy(name, self._sizes[name])
        return grads, peak

    def _hand_on(self, block: PlacedBlock, walk: BackwardWalk, grads: Gradients) -> int:
        """Let a block's gradients of its outputs go, and give those of its inputs to who made
        them; return the height of that.
        """
        makers = dict(zip(block.bytes.output_names, block.outputs, strict=True))
        edges = list(zip(block.bytes.input_names, block.inputs, block.copies, strict=True))
        for local, name, _ in edges:
            given = walk.given.get(local)
            if given is not None and given.is_sum:
                if not grads.is_own(name):
                    grads.copy(name, self._sizes[name])
            elif (
                given is not None and given.output is not None and makers[given.output] in grads.of
            ):
                grads.share(f"given {local}", makers[given.output], gaps=given.gaps)
            elif given is not None:
                grads.allocate(f"given {local}", given.num_bytes)
        for name in block.outputs:
            if name in grads.of:
                grads.free(name)
        peak = grads.live
        for local, name, copy in reversed(edges):
            mine = f"given {local}"
            if mine not in grads.of:
                continue
            if copy is not None:
                peak = max(peak, grads.live + copy.returning_bytes)
                if not copy.passes_on:
                    grads.copy(mine, self._sizes[name])
            grads.rename(mine, name)
            before = grads.live
            peak = max(peak, before + grads.add_up(name, self._sizes[name]))
        return peak

    @cached_property
    def _leaves(self) -> tuple[frozenset[str], ...]:
        """For each block, the inputs that arrived and no block before it takes."""
        seen: set[str] = set()
        leaves = []
        for block in self.blocks:
            edges = zip(block.bytes.input_names, block.inputs, block.copies, strict=True)
            leaves.append(
                frozenset(
                    local
                    for local, name, copy in edges
                    if name in self.arriving and name not in seen and copy is None
                )
            )
            seen.update(block.inputs)
        return tuple(leaves)

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """The blocks that use each trained parameter, in order."""
        users: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name in block.params.values():
                users.setdefault(name, []).append(index)
        return users

    def is_shared(self, name: str) -> bool:
        """Whether several blocks use a trained parameter."""
        return len(self._users[name]) > 1

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each value at a block's edge, as its maker leaves it."""
        sizes = {**self.side, **self.arriving}
        for block in self.blocks:
            for name, edge in zip(block.inputs, block.bytes.inputs, strict=True):
                sizes.setdefault(name, edge.num_bytes)
            for name, edge in zip(block.outputs, block.bytes.outputs, strict=True):
                sizes[name] = edge.num_bytes
        return sizes


def weight_job(aside: Sequence[Aside], *, first: bool, wide: int) -> tuple[int, int]:
    """Return the height of a job that makes the weight gradients put aside, above its start,
    and the bytes of gradients it leaves. The last put aside are made first.
    """
    users = Counter(name for one in aside for name in dict(one.held))
    begun: set[str] = set()
    live = peak = left = 0
    for one in reversed(aside):
        # A view's gradient goes to what it is a view of as one with zeros around it.
        weight = one.weight_bytes if one.adds else one.whole_bytes
        made = weight + one.bias_bytes
        adds = one.adds and wide == 1
        is_begun = one.is_begun or one.weight in begun
        begun.add(one.weight)
        stays = wide * (one.bias_bytes if is_begun else made) if first else 0
        if first and not is_begun:
            # Given to autograd, a gradient is copied: who gave it has it still.
            passing = 0 if adds else made
        else:
            # Where sums are wider, autograd makes a gradient to be added and let go.
            passing = one.bias_bytes if adds else made * (2 if wide > 1 else 1)
            passing += 0 if one.adds else weight
        peak = max(peak, live + stays + passing)
        left += stays
        live += stays
        for name, size in dict(one.held).items():
            users[name] -= 1
            live -= 0 if users[name] else size
    return peak, left


def held_aside(aside: Sequence[Aside]) -> dict[str, int]:
    """Return what weight gradients put aside wait with, each storage once."""
    return {name: size for one in aside for name, size in one.held}


def _named(one: Aside, block: PlacedBlock, index: int, root: Mapping[str, str]) -> Aside:
    """Name what it holds so that no other block's storage is called the same."""
    inputs = {
        local: root[name]
        for local, name, copy in zip(
            block.bytes.input_names, block.inputs, block.copies, strict=True
        )
        if not _is_copied(copy)
    }
    inputs |= {
        f"gradient {local}": f"gradient {name}"
        for local, name in zip(block.bytes.output_names, block.outputs, strict=True)
    }
    held = tuple((inputs.get(name, f"block {index} {name}"), size) for name, size in one.held)
    weight = block.params.get(one.weight, f"block {index} {one.weight}")
    return one._replace(held=held, weight=weight)


def _going(block: PlacedBlock, let_go: frozenset[str]) -> frozenset[str]:
    """The inputs that only the block still keeps: its own copies, and values let go with it."""
    edges = zip(block.bytes.input_names, block.inputs, block.copies, strict=True)
    return frozenset(
        local
        for local, name, copy in edges
        if _is_copied(copy) or (copy is None and name in let_go)
    )


def _is_copied(copy: Copy | None) -> bool:
    return copy is not None and not copy.is_view


def _kept_copies(block: PlacedBlock) -> int:
    edges = zip(block.bytes.inputs, block.copies, strict=True)
    return sum(c.num_bytes for edge, c in edges if edge.is_kept and c is not None)

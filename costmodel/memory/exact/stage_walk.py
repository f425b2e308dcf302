"""What the jobs of one stage hold: its blocks one after the other, their edges counted once.

A value between two blocks lives while a block still needs it, or keeps it for its backward;
one that is brought to another placement first is copied for the block that takes it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.memory.block.backward_walk import Aside, BackwardWalk
from costmodel.memory.block.deferred_weights import held_aside, weight_job
from costmodel.memory.block.gradients import Gradients
from costmodel.memory.exact.placed_block import Copy, PlacedBlock


class Turn(NamedTuple):
    """A block's part of a job: the bytes alive above the job's start when the block is called,
    at its height and when it has returned; and the height outside the block, where its inputs or
    their gradients are brought to other placements.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    beside_bytes: int


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
            for name, viewed in zip(block.outputs, block.kind.viewed, strict=True):
                root[name] = name if viewed is None else root[block.inputs[viewed]]
        return root

    @cached_property
    def _keepers(self) -> dict[str, int]:
        """The first block that keeps each value: the last to let it go."""
        keepers: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            for at in block.kind.kept_inputs:
                keepers.setdefault(self._roots[block.inputs[at]], index)
            for at in block.kind.kept_outputs:
                keepers.setdefault(self._roots[block.outputs[at]], index)
        return keepers

    @cached_property
    def forward(self) -> ForwardBytes:
        """The forward job of one microbatch."""
        root, keepers = self._roots, self._keepers
        last = {root[name]: len(self.blocks) for name in self.leaving if name in root}
        for index, block in enumerate(self.blocks):
            for name in (*block.inputs, *block.outputs):
                last[root[name]] = max(last.get(root[name], 0), index)
        alive = dict(self.side)
        live = sum(alive.values())
        own = 0
        turns = []
        for index, block in enumerate(self.blocks):
            kind = block.kind
            start = beside = live
            for copy in kind.copies:
                if copy is not None:
                    beside = max(beside, start + copy.making_bytes)
                    start += copy.num_bytes
            peak = start + kind.bytes.forward_rise_bytes
            own += kind.kept_bytes
            live += kind.kept_bytes
            for name, edge in zip(block.outputs, kind.bytes.outputs, strict=True):
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
        counted here (`sharded_bytes`). `staying` are values that others keep alive.
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
        root, keepers = self._roots, self._keepers
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
            block, shared = self.blocks[index], self._shared[index]
            kind = block.kind
            gone = [name for name in let_go.get(index, ()) if name not in put_aside]
            start = live + grads.live
            height = start + kind.bytes.second_rise_bytes
            live += kind.bytes.made_again_bytes
            outputs = list(zip(kind.bytes.output_names, block.outputs, strict=True))
            begun = [
                (local, block.inputs[at])
                for at, local in kind.uncopied
                if block.inputs[at] in grads.of
            ]
            walk = kind.bytes.backward(
                first=first,
                held=frozenset(
                    local
                    for local, name in (*outputs, *begun)
                    if name in grads.of and not grads.is_own(name)
                ),
                begun=frozenset(local for local, _ in begun),
                leaves=self._leaves[index],
                split=index < num_aside,
                wide=wide,
                adds_products=not sharded,
                staying=frozenset(
                    local
                    for local, name in outputs
                    if root[name] in staying or root[name] in put_aside
                ),
                going=kind.copied.union(
                    local for at, local in kind.uncopied if block.inputs[at] in gone
                ),
                waiting=frozenset(block.params if sharded and self.params_are_dtensors else shared),
            )
            height = max(height, live + grads.live + walk.rise_bytes)
            live -= kind.kept_bytes + kind.bytes.made_again_bytes
            live -= sum(self._sizes[name] for name in gone)
            if num_aside:
                made.update(block.params[param] for param in walk.made)
            if stays:
                more = sum(kind.bytes.params[one] for one in walk.made if one not in shared)
                left += wide * more
                live += wide * more
            for param in walk.made.intersection(shared):
                # One sum of the gradients that all its users make goes to the parameter.
                name, size = block.params[param], kind.bytes.params[param]
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
            turns.append(Turn(start, height, live + grads.live, beside))
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
        kind = block.kind
        makers = dict(zip(kind.bytes.output_names, block.outputs, strict=True))
        given = [(local, kind.input_at[local], one) for local, one in walk.given.items()]
        for local, at, one in given:
            name = block.inputs[at]
            if one.is_sum:
                if not grads.is_own(name):
                    grads.copy(name, self._sizes[name])
            elif one.output is not None and makers[one.output] in grads.of:
                grads.share(f"given {local}", makers[one.output], gaps=one.gaps)
            else:
                grads.allocate(f"given {local}", one.num_bytes)
        for name in block.outputs:
            if name in grads.of:
                grads.free(name)
        peak = grads.live
        for local, at, one in reversed(given):
            if one.is_sum:
                continue
            mine, name, copy = f"given {local}", block.inputs[at], kind.copies[at]
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
            found = [
                local
                for at, local in block.kind.uncopied
                if block.inputs[at] in self.arriving and block.inputs[at] not in seen
            ]
            leaves.append(frozenset(found))
            seen.update(block.inputs)
        return tuple(leaves)

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """The blocks that use each trained parameter of several blocks, in order."""
        users: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name in block.params.values():
                users.setdefault(name, []).append(index)
        return {name: blocks for name, blocks in users.items() if len(blocks) > 1}

    @cached_property
    def _shared(self) -> tuple[frozenset[str], ...]:
        """For each block, those of its trained parameters that other blocks use too."""
        users = self._users
        return tuple(
            frozenset(local for local, name in block.params.items() if name in users)
            for block in self.blocks
        )

    def is_shared(self, name: str) -> bool:
        """Whether several blocks use a trained parameter."""
        return name in self._users

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each value at a block's edge, as its maker leaves it."""
        sizes = {**self.side, **self.arriving}
        for block in self.blocks:
            for name, edge in zip(block.inputs, block.kind.bytes.inputs, strict=True):
                sizes.setdefault(name, edge.num_bytes)
            for name, edge in zip(block.outputs, block.kind.bytes.outputs, strict=True):
                sizes[name] = edge.num_bytes
        return sizes


def _named(one: Aside, block: PlacedBlock, index: int, root: Mapping[str, str]) -> Aside:
    """Name what it holds so that no other block's storage is called the same."""
    kind = block.kind
    inputs = {
        local: root[name]
        for local, name in zip(kind.bytes.input_names, block.inputs, strict=True)
        if local not in kind.copied
    }
    inputs |= {
        f"gradient {local}": f"gradient {name}"
        for local, name in zip(kind.bytes.output_names, block.outputs, strict=True)
    }
    held = tuple((inputs.get(name, f"block {index} {name}"), size) for name, size in one.held)
    weight = block.params.get(one.weight, f"block {index} {one.weight}")
    return one._replace(held=held, weight=weight)

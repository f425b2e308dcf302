"""A stage's two jobs: the forward, block by block, and the backward (`backward`), each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from costmodel.memory.exact.stage.backward import backward_job
from costmodel.memory.exact.stage.blocks import (
    BackwardBytes,
    BlockSample,
    ForwardBytes,
    StageBlocks,
)


@dataclass(frozen=True, kw_only=True)
class StageWalk(StageBlocks):
    """A stage's blocks, and the jobs that run them, each found once."""

    @cached_property
    def forward(self) -> ForwardBytes:
        """The forward job of one microbatch."""
        root, keepers = self.roots, self.keepers
        last = {root[name]: len(self.blocks) for name in self.leaving if name in root}
        for index, block in enumerate(self.blocks):
            for name in (*block.inputs, *block.outputs):
                last[root[name]] = max(last.get(root[name], 0), index)
        alive = dict(self.side)
        live = sum(alive.values())
        own = 0
        samples = []
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
            # Python frees a value after its last reader, unless autograd keeps it.
            for name in {root[n] for n in (*block.inputs, *block.outputs)}:
                if last[name] == index and name not in keepers:
                    live -= alive.pop(name, 0)
            samples.append(BlockSample(start, peak, live, beside))
        last_bytes, made = live, live
        for copy in self.sent_copies.values():
            last_bytes = max(last_bytes, made + copy.making_bytes)
            made += copy.num_bytes
        inside = [n for n in alive if n in keepers and n not in self.leaving]
        own += sum(alive.pop(n) for n in inside if n not in self.side)
        kept = {n: size for n, size in alive.items() if n in keepers}
        kept |= {n: size for n, size in self.arriving.items() if n in keepers}
        return ForwardBytes(
            samples=tuple(samples), last_bytes=last_bytes, kept_bytes=own, kept=kept
        )

    def backward(
        self,
        received: Mapping[str, int],
        *,
        first: bool,
        num_deferred: int = 0,
        flush: bool = False,
        sharded: bool = False,
        kept_by_others: frozenset[str] = frozenset(),
    ) -> BackwardBytes:
        """Return a backward job: see `backward.backward_job`."""
        key = (*received.items(), first, num_deferred, flush, sharded, kept_by_others)
        if key not in self._backwards:
            self._backwards[key] = backward_job(
                self, received, first=first, num_deferred=num_deferred, flush=flush,
                sharded=sharded, kept_by_others=kept_by_others,
            )  # fmt: skip
        return self._backwards[key]

    @cached_property
    def _backwards(self) -> dict[tuple, BackwardBytes]:
        return {}

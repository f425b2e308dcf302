"""A stage's backward job: its blocks last to first, and the gradients between them.

What is alive when a block runs backward: what this block and those before it keep; what the
block recomputes; the gradients of its outputs; gradients of parameters, for good in the first
microbatch and for the length of an op in later ones; and what deferred weight gradients refer to.
"""

from __future__ import annotations

from costmodel.memory.block.deferred_weights import (
    DeferredWeight,
    deferred_storages,
    weight_job,
)
from costmodel.memory.block.gradients import Gradients
from costmodel.memory.block.placed_block import BackwardWalk, PlacedBlock
from costmodel.memory.exact.stage.stage_walk import (
    BackwardBytes,
    BackwardVariant,
    BlockSample,
    StageWalk,
)


def backward_job(stage: StageWalk, variant: BackwardVariant) -> BackwardBytes:
    """Return a backward job; the stage remembers it."""
    if variant not in stage.backwards:
        stage.backwards[variant] = _BackwardTally(stage, variant).run()
    return stage.backwards[variant]


class _BackwardTally:
    """A backward job so far. Mutable: it is a tally of live bytes above the job's start."""

    def __init__(self, stage: StageWalk, variant: BackwardVariant) -> None:
        self._stage, self._variant = stage, variant
        # FSDP2 takes gradients as autograd made them; `fsdp_walk` counts its sums.
        self._factor = 1 if stage.is_sharded else stage.gradient_factor
        self._grads_stay = variant.first and not stage.is_sharded
        self._freed_by: dict[int, list[str]] = {}
        for name, keeper in stage.keepers.items():
            if name not in stage.arriving and name not in variant.kept_by_others:
                self._freed_by.setdefault(keeper, []).append(name)
        self._live = self._new_gradients = 0
        self._grads, self._peak = _returned_gradients(stage, variant.received)
        self._referred = {
            f"gradient {name}" for name in variant.received if name not in stage.sent_copies
        }
        """Storages that deferred weight gradients refer to, or that others hold anyway."""
        self._summing: set[str] = set()
        """Parameters of several blocks whose gradients are being summed."""
        self._made: set[str] = set()
        """Parameters that have a gradient by now."""
        self._deferred: list[DeferredWeight] = []

    def run(self) -> BackwardBytes:
        """Run all blocks, and with `flush` what they defer."""
        indices = range(len(self._stage.blocks) - 1, -1, -1)
        samples = tuple(self._run_block(index) for index in indices)
        live = self._live + self._grads.live
        deferred = tuple(d._replace(has_gradient=d.weight in self._made) for d in self._deferred)
        if self._variant.flush:
            rise, more = weight_job(
                deferred, first=self._variant.first, gradient_factor=self._stage.gradient_factor
            )
            self._peak = max(self._peak, live + rise)
            self._new_gradients += more
            deferred = ()
        return BackwardBytes(
            samples=samples,
            rise_bytes=self._peak,
            new_gradient_bytes=self._new_gradients,
            deferred=deferred,
        )

    def _run_block(self, index: int) -> BlockSample:
        block, grads = self._stage.blocks[index], self._grads
        kind = block.kind
        # The first block that keeps a value runs backward last of those that do, and frees it.
        freed = [n for n in self._freed_by.get(index, ()) if n not in self._referred]
        # Live bytes are counted from the job's start: what is freed since then makes them negative.
        start = self._live + grads.live
        # The block's forward runs again first: its height, then what that leaves for backward.
        height = start + kind.bytes.recompute_rise_bytes
        self._live += kind.bytes.recomputed_bytes
        walk = self._walk_block(index, freed)
        height = max(height, self._live + grads.live + walk.rise_bytes)
        # Nothing of the block's graph is left then. A value at its edge goes with the first block
        # that keeps it, unless a deferred weight gradient still needs it.
        self._live -= kind.kept_bytes + kind.bytes.recomputed_bytes
        self._live -= sum(self._stage.sizes[name] for name in freed)
        self._keep_gradients(index, walk)
        self._defer(index, walk)
        beside = self._live + _hand_on(self._stage, block, walk, grads)
        self._peak = max(self._peak, height, beside)
        return BlockSample(start, height, self._live + grads.live, beside)

    def _walk_block(self, index: int, freed: list[str]) -> BackwardWalk:
        """Run one block's ops, given which of its edges others hold."""
        stage, grads = self._stage, self._grads
        block = stage.blocks[index]
        kind = block.kind
        edges = zip(kind.bytes.outputs, block.outputs, strict=True)
        outputs = [(edge.name, name) for edge, name in edges]
        started = [
            (local, block.inputs[at]) for at, local in kind.uncopied if block.inputs[at] in grads.of
        ]
        outlasting = self._variant.kept_by_others | self._referred
        return kind.bytes.backward(
            first=self._variant.first,
            held=frozenset(
                local
                for local, name in (*outputs, *started)
                if name in grads.of and not grads.is_own(name)
            ),
            started=frozenset(local for local, _ in started),
            leaves=stage.leaves[index],
            split=index < self._variant.num_deferred,
            gradient_factor=self._factor,
            adds_products=not stage.is_sharded,
            kept_by_others=frozenset(
                local for local, name in outputs if stage.roots[name] in outlasting
            ),
            freed_inputs=kind.copied.union(
                local for at, local in kind.uncopied if block.inputs[at] in freed
            ),
            waiting=frozenset(block.params)
            if stage.params_are_dtensors or stage.adds_late
            else stage.shared[index],
        )

    def _keep_gradients(self, index: int, walk: BackwardWalk) -> None:
        """Count the gradients of parameters that the block leaves."""
        stage, factor = self._stage, self._factor
        block, shared = stage.blocks[index], stage.shared[index]
        params = block.kind.bytes.params
        if self._variant.num_deferred:
            self._made.update(block.params[param] for param in walk.made)
        # In later microbatches gradients are added to the sums and freed: `backward_walk` counts
        # them while their op runs.
        if stage.adds_late:
            self._live += sum(params[param] for param in walk.made if param not in shared)
        if self._grads_stay:
            more = factor * sum(params[param] for param in walk.made if param not in shared)
            self._new_gradients += more
            self._live += more
        for param in walk.made.intersection(shared):
            # Autograd sums the gradients that all users make, and gives the parameter the sum.
            name, size = block.params[param], params[param]
            if name not in self._summing:
                self._summing.add(name)
                self._live += size
            # The first user runs backward last: then the sum is complete and moves to the
            # parameter's own buffer.
            if index == stage.users[name][0]:
                self._live -= 0 if stage.adds_late else size
                self._new_gradients += factor * size if self._grads_stay else 0
                self._live += factor * size if self._grads_stay else 0

    def _defer(self, index: int, walk: BackwardWalk) -> None:
        """Count what the block's deferred weight gradients refer to."""
        stage = self._stage
        named = [_named(d, stage, index) for d in walk.deferred]
        for name, size in deferred_storages(named).items():
            # What a block before keeps too has not been freed yet.
            is_there = name in stage.arriving or name in self._variant.kept_by_others
            is_there = is_there or name in self._referred
            is_there = is_there or stage.keepers.get(name, index) < index
            self._live += 0 if is_there else size
            self._referred.add(name)
        self._deferred += named


def _returned_gradients(stage: StageWalk, received: tuple[str, ...]) -> tuple[Gradients, int]:
    """Return the gradients of what left, brought back to where its maker left it, and the
    height of that. Those received count nothing here: others hold them.
    """
    grads, peak = Gradients(), 0
    for name in received:
        grads.allocate(name, 0)
        grads.hold(name)
    for name, copy in stage.sent_copies.items():
        if name in received:
            peak = max(peak, grads.live + copy.returning_bytes)
            if not copy.passes_on:
                grads.copy(name, stage.sizes[name])
    return grads, peak


def _hand_on(stage: StageWalk, block: PlacedBlock, walk: BackwardWalk, grads: Gradients) -> int:
    """Free a block's gradients of its outputs, and give those of its inputs to the blocks that
    made them; return the height of that.
    """
    kind = block.kind
    edges = zip(kind.bytes.outputs, block.outputs, strict=True)
    makers = {edge.name: name for edge, name in edges}
    inputs = enumerate(kind.bytes.inputs)
    given = [(e.name, at, walk.given[e.name]) for at, e in inputs if e.name in walk.given]
    for local, at, gradient in given:
        name = block.inputs[at]
        if gradient.is_sum:
            # The block added to the gradient that later blocks had left. A buffer that others
            # have, too, must not change, so the sum took a new one.
            if not grads.is_own(name):
                grads.copy(name, stage.sizes[name])
        elif gradient.output is not None and makers[gradient.output] in grads.of:
            grads.share(f"given {local}", makers[gradient.output], gaps=gradient.gaps)
        else:
            grads.allocate(f"given {local}", gradient.num_bytes)
    for name in block.outputs:
        if name in grads.of:
            grads.free(name)
    # Outputs' gradients go first: the block's graph is done with them. Then each input's gradient
    # returns to the placement in which its maker left the value, and is added to what is there.
    peak = grads.live
    for local, at, gradient in reversed(given):
        if gradient.is_sum:
            continue
        mine, name, copy = f"given {local}", block.inputs[at], kind.copies[at]
        if copy is not None:
            peak = max(peak, grads.live + copy.returning_bytes)
            if not copy.passes_on:
                grads.copy(mine, stage.sizes[name])
        grads.rename(mine, name)
        before = grads.live
        peak = max(peak, before + grads.add_up(name, stage.sizes[name]))
    return peak


def _named(deferred: DeferredWeight, stage: StageWalk, index: int) -> DeferredWeight:
    """Name what it refers to so that no other block's storage is called the same."""
    block = stage.blocks[index]
    kind = block.kind
    edges = zip(kind.bytes.inputs, block.inputs, strict=True)
    names = {e.name: stage.roots[name] for e, name in edges if e.name not in kind.copied}
    made = zip(kind.bytes.outputs, block.outputs, strict=True)
    names |= {f"gradient {edge.name}": f"gradient {name}" for edge, name in made}
    held = tuple((names.get(name, f"block {index} {name}"), size) for name, size in deferred.held)
    weight = block.params.get(deferred.weight, f"block {index} {deferred.weight}")
    return deferred._replace(held=held, weight=weight)

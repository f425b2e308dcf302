"""The programs a rank runs: one for each block class, bucket and number of samples.

All blocks of a class share its program. A batch that does not divide evenly brings
microbatches of two sizes; the program of a size is made when the size is first met. Compiled are
those of the sizes that `planner.runtime.step.compiling` chooses; others run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from planner.errors import LayoutError
from planner.language.across.cut.gathers import BATCH
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import ModelGraph, Program
from planner.language.graph.batch_split import BatchSplit
from planner.language.layout.axes import Degrees
from planner.language.lowering.lowering import local_program
from planner.language.lowering.narrow_products import gathered_narrow
from planner.language.ops.recompute_choice import ops_made_again
from planner.language.ops.record import why_no_graph
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.beside_collectives import BesideCollectives
from planner.runtime.stage.compiled.block import CompiledBlock
from planner.runtime.stage.compiled.graphs import Capture, Standing
from planner.runtime.stage.compiled.halves import cut
from planner.runtime.stage.compiled.kernels import Compiler
from planner.runtime.stage.compiled.sizes import Size, places_of
from planner.runtime.stage.compiled.trace import trace
from planner.runtime.stage.program_fx import import_libraries, to_graph_module
from planner.runtime.stage.recompute import Keeper
from planner.runtime.stage.weight_grads import WeightQueue

Run = Callable[..., tuple[Tensor, ...]]

_MOST_MET = 64
"""Splits of batches whose sizes are not looked at again."""


class Variant(NamedTuple):
    """Which of the programs of a rank."""

    class_index: int
    bucket: int
    num_samples: int
    parts: tuple[int, ...] = ()
    """Samples of each replica, where ops run on the whole batch; else none."""
    watched: tuple[str, ...] = ()
    """Tensors of the class that come as further outputs."""


class Programs:
    """Makes and keeps the programs of one rank. Mutable: sizes are met as batches come, and
    `bucket` is that of the step: which of the graphs blocks run; `parts` are the samples of each
    replica, where ops run on the whole batch.
    """

    def __init__(
        self,
        graphs: Sequence[ModelGraph],
        plan: Plan,
        mesh: Mesh,
        *,
        keeper: Keeper,
        weight_queue: WeightQueue | None,
        beside: BesideCollectives | None = None,
    ) -> None:
        """`graphs` are the model on batches of each shape, the plan's own first."""
        # This rank does not run the model's forward, which imports them.
        import_libraries(name for graph in graphs for name in graph.libraries)
        self._graphs, self._plan, self._mesh = graphs, plan, mesh
        self.bucket = 0
        selective = any("selective" in stage.recompute_by_block for stage in plan.stages)
        self._keeper = keeper if selective else None
        self._weight_queue, self._beside = weight_queue, beside
        self._full_size = plan.microbatch_units // mesh.size("batch")
        # A replica's share may differ from the mean, in which layouts were found.
        shares = plan.unit_shares
        self._own_size = shares[mesh.rank("batch")] if shares else self._full_size
        self._chosen = {entry.class_index: entry.ops for entry in plan.recomputed}
        self._of_class: dict[int, Callable[[int], Run]] = {}
        self._runs: dict[Variant, Run] = {}
        self._narrow: dict[int, frozenset[str]] = {}
        self._met: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()
        self._checked: set[tuple[Variant, Degrees]] = set()
        self._compiled: dict[tuple[int, Size, bool], CompiledBlock] = {}
        self._standing: dict[tuple[int, bool], Standing] = {}
        # Ops on the whole batch are made for each way in which replicas share it.
        self._planned = [graph_under(graph, plan) for graph in graphs]
        self.runs_whole = [of is not graph for of, graph in zip(self._planned, graphs, strict=True)]
        count = mesh.size("batch")
        self.parts = tuple(len(plan.split.part(0, count, part)) for part in range(count))

    def own_sizes(self, split: BatchSplit, bucket: int) -> tuple[Size, ...]:
        """Return the sizes of this rank's microbatches of a batch that is split so, largest first:
        those of the plan, where the batch is the plan's.
        """
        count, own = self._mesh.size("batch"), self._mesh.rank("batch")
        places = places_of(split, bucket, count, in_whole=self.runs_whole[bucket])
        return tuple(sorted((size for number, size in places if number == own), reverse=True))

    def compile(
        self,
        class_index: int,
        size: Size,
        compiler: Compiler,
        *,
        recomputes: bool,
        capture: Capture | None = None,
    ) -> str | None:
        """Compile a class's program of a size; given a `capture`, in CUDA graphs. Return why not in
        these, where none holds it.

        `recomputes`: that which makes cheap ops again in its backward; else that which saves all.
        Raises NotCompilable where no graph holds the program, CompilerFailed where the compiler
        fails.
        """
        variant = Variant(class_index, *size)
        program = self._lowered(variant)
        again = self._made_again(variant, program) if recomputes else frozenset()
        joint = trace(program, self._groups(), self._mesh.device)
        block = CompiledBlock(
            cut(joint, made_again=again),
            compiler,
            eager=self._made(variant),
            queue=self._weight_queue,
            beside=self._beside is not None,
        )
        found = None if capture is None else why_no_graph(program)
        if capture is not None and joint.writes:
            found = "it writes buffers"
        if capture is not None and found is None:
            kinds = [program.tensor[name].kind for name in (*program.inputs, *program.params)]
            block.run_in_graphs(
                capture,
                params=[at for at, kind in enumerate(kinds) if kind == "param"],
                num_blocks=sum(
                    each.class_index == class_index for each in self._graphs[size.bucket].blocks
                ),
                standing=self._standing.setdefault((class_index, recomputes), Standing()),
            )
        self._compiled[class_index, size, recomputes] = block
        return found

    def run_eagerly(self, class_index: int, sizes: Collection[Size] | None = None) -> None:
        """Take compiled programs of a class back: all, or those of some sizes."""
        self._compiled = {
            (index, size, recomputes): block
            for (index, size, recomputes), block in self._compiled.items()
            if index != class_index or (sizes is not None and size not in sizes)
        }

    def is_compiled(self, class_index: int) -> bool:
        """Whether a class's program is compiled, of some size."""
        return any(index == class_index for index, *_ in self._compiled)

    def of_class(self, class_index: int) -> Callable[[int], Run]:
        """Return what gives a class's program for a number of samples.

        Raises LayoutError now if the class can't run on a full microbatch as planned, and later if
        it can't run on another number.
        """
        if class_index not in self._of_class:
            # Made now for a full microbatch of each bucket, so that a class that can't run shows
            # before training.
            for bucket in range(len(self._graphs)):
                self._made(Variant(class_index, bucket, self._own_size, self._parts(bucket)))
            self._of_class[class_index] = partial(self._of_step, class_index)
        eager = self._of_class[class_index]
        if not self.is_compiled(class_index):
            return eager

        def run(num_samples: int) -> Run:
            return self._compiled_of(class_index, num_samples, False) or eager(num_samples)

        return run

    def recomputing(self, class_index: int) -> Callable[[int], Run | None]:
        """Return what gives a class's compiled program that makes cheap ops again in its backward,
        for a number of samples; None where there is none of that size.
        """
        return lambda num_samples: self._compiled_of(class_index, num_samples, True)

    def _compiled_of(
        self, class_index: int, num_samples: int, recomputes: bool
    ) -> CompiledBlock | None:
        size = Size(self.bucket, num_samples, self._parts(self.bucket))
        return self._compiled.get((class_index, size, recomputes))

    def check_sizes(self, split: BatchSplit) -> None:
        """Raise LayoutError where a block of the model can't run on a microbatch of a batch.

        Of all stages and replicas, so on every rank alike and ahead of the step: a rank that found
        out in its own job would leave the others waiting.
        """
        if (self.bucket, split.sizes) in self._met:
            return
        if len(self._met) == _MOST_MET:  # (of large batches a split is large, too)
            self._met.clear()
        plan, graph = self._plan, self._graphs[self.bucket]
        for index, stage in enumerate(plan.stages):
            degrees = plan.stage_degrees(index)
            count = degrees.along("batch")
            # (The plan's are made ahead.)
            sizes = {size.num_samples for _, size in places_of(split, self.bucket, count)}
            sizes -= {size.num_samples for _, size in places_of(plan.split, self.bucket, count)}
            of_classes = {graph.blocks[block].class_index for block in stage.blocks}
            for class_index, size in product(sorted(of_classes), sorted(sizes)):
                variant = Variant(class_index, self.bucket, size, self._parts(self.bucket))
                if (variant, degrees) not in self._checked:
                    self._lowered(variant, degrees)
                    self._checked.add((variant, degrees))
        self._met.add((self.bucket, split.sizes))

    def gathered_narrow(self, class_index: int) -> frozenset[str]:
        """Return the parameters of a class's program that ZeRO gathers in 8 bits."""
        if class_index not in self._narrow:
            variant = Variant(class_index, 0, self._own_size, self._parts(0))
            self._narrow[class_index] = gathered_narrow(self._lowered(variant))
        return self._narrow[class_index]

    def _parts(self, bucket: int) -> tuple[int, ...]:
        return self.parts if self.runs_whole[bucket] else ()

    def handing_out(self, class_index: int, tensors: tuple[str, ...]) -> Callable[[int], Run]:
        """Return the same, where these tensors of the class come as further outputs."""
        return partial(self._of_step, class_index, watched=tensors)

    def _of_step(self, class_index: int, num_samples: int, *, watched: tuple[str, ...] = ()) -> Run:
        parts = self._parts(self.bucket)
        return self._made(Variant(class_index, self.bucket, num_samples, parts, watched))

    def _made(self, variant: Variant) -> Run:
        if variant not in self._runs:
            self._runs[variant] = self._make(variant)
        return self._runs[variant]

    def _make(self, variant: Variant) -> Run:
        program = self._lowered(variant)
        return to_graph_module(
            program,
            self._groups(),
            self._mesh.device,
            weight_queue=self._weight_queue,
            beside=self._beside,
            pieces=self._plan.gather_pieces,
            keeper=self._keeper,
            made_again=self._made_again(variant, program),
        ).forward

    def _groups(self) -> dict[str, ProcessGroup | None]:
        return self._mesh.lowered_groups() | {BATCH: self._mesh.group(BATCH)}

    def _made_again(self, variant: Variant, program: Program) -> frozenset[str]:
        whole = self._graphs[variant.bucket].classes[variant.class_index]
        return ops_made_again(whole, program, self._chosen.get(variant.class_index))

    def _lowered(self, variant: Variant, degrees: Degrees | None = None) -> Program:
        """Return the program of a variant on this rank, or on the meshes of these sizes."""
        degrees = degrees or self._mesh.degrees
        class_index, bucket, num_samples, parts, watched = variant
        graph = self._graphs[bucket]
        if parts:
            graph = graph_under(graph, self._plan, parts)
        try:
            return local_program(
                graph,
                self._plan,
                class_index,
                degrees=degrees,
                microbatch_size=num_samples,
                watched=watched,
                planned=self._planned[bucket] if parts else None,
            )
        except LayoutError as error:
            full_size = self._plan.microbatch_units // degrees.along("batch")
            if num_samples == full_size:
                raise
            unit = self._plan.unit.size
            remedy = f"give batches of {self._plan.global_batch}"
            if num_samples == self._own_size:
                remedy = f"give replicas shares whose sizes divide as {full_size * unit} does"
            raise LayoutError(
                f"a microbatch of {num_samples * unit} instead of {full_size * unit} samples a "
                f"rank can't be run as planned ({error}); {remedy}"
            ) from error

"""What each block class computes, whole, in one process: what ranks are compared with.

Classes are run in the order of the chain, each on what the class before it made, so their inputs
are ones that occur. Parameters are drawn (`windows`); buffers and constants have the values that
the model gives them. Each class is run once more with all it takes moved by one unit in the last
place: how far the two come apart is the rounding of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from planner.capture.modes.fixed_draws import FixedDraws
from planner.capture.source.model_file import ModelSource
from planner.language.across.cut.gathers import BATCH
from planner.language.graph import Block, ModelGraph, Program, TensorMeta
from planner.language.layout.axes import lowered_axes
from planner.language.layout.pieces import Piece
from planner.runtime.batches.inputs.feed import Preamble
from planner.runtime.initial.record import record
from planner.runtime.initial.recording import NotReplayableError
from planner.runtime.initial.replay import Replay
from planner.runtime.initial.values import Place, find
from planner.runtime.proofs.by_block.cut import Cut, batch_of
from planner.runtime.proofs.by_block.simulate.block_run import BlockRun, ParamGradient
from planner.runtime.proofs.by_block.simulate.windows import drawn, moved_by_a_unit
from planner.runtime.proofs.promote import drawing_ops
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.state.weights import constant

CPU = torch.device("cpu")
_ALONE = dict.fromkeys((*(axis.name for axis in lowered_axes()), BATCH))
"""Groups by axis: one rank has all."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a block, whole.

    Attributes:
        values: what it took, inputs and params by the program's names.
        held: buffers among them after the forward.
        outputs: what it made.
        cotangents: the gradients that outputs were given.
        input_grads: those of inputs; None where none arrives.
        param_grads: those of params, to be made.
    """

    values: Mapping[str, Tensor]
    held: Mapping[str, Tensor]
    outputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    input_grads: Mapping[str, Tensor | None]
    param_grads: Mapping[str, ParamGradient]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A block class on so many samples: its program, a run, and the run that tells its rounding."""

    block: Block
    program: Program
    run: Ran
    moved: Ran


class Facts:
    """Runs classes when they are asked for, and keeps what the next ones take. Mutable."""

    def __init__(self, cut: Cut, graph: ModelGraph, source: ModelSource, num_samples: int) -> None:
        """`graph` is the plan's own."""
        self._graph, self._num_samples = cut.graph, num_samples
        self.draws: Callable[[], AbstractContextManager[Any]] = (
            FixedDraws if drawing_ops(graph) else nullcontext
        )
        self._held = held_values(cut.graph, source)
        leaves = {
            name: tensor.to(getattr(torch, cut.graph.tensor[name].dtype))
            for name, tensor in batch_of(graph, source, cut, num_samples).items()
        }
        used = {n for block in graph.blocks for n in block.inputs if n not in graph.producer}
        tensors = {name: self._held[name] for name in cut.graph.preamble.params}
        with self.draws():
            made = Preamble(cut.graph, used, tensors, CPU)(leaves, num_samples)
        self._side = {
            name: tensor.to(getattr(torch, cut.graph.tensor[name].dtype))
            for name, tensor in made.items()
            if name in used
        }
        self._first: dict[int, Block] = {}
        for block in cut.graph.blocks:
            self._first.setdefault(block.class_index, block)
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def first_block(self, class_index: int) -> Block:
        """Return the class's first block, which is the one that is run."""
        return self._first[class_index]

    def of(self, class_index: int) -> Fact:
        """Return a class's fact; classes that its inputs come from are run forward first."""
        block = self._first[class_index]
        program = self._graph.classes[class_index].bind(self._num_samples)
        return Fact(
            block=block,
            program=program,
            # The unmoved run first: what it makes is what the next classes take.
            run=self._run(block, program, moved=None),
            moved=self._run(block, program, moved=1),
        )

    def param(self, name: str, moved: int | None = None) -> Tensor:
        """Return a parameter, buffer or constant by its name in the graph."""
        meta = self._graph.tensor[name]
        if meta.kind == "param":
            return drawn(name, meta.shape_at(1), getattr(torch, meta.dtype), moved=moved)
        return self._held[name].clone()

    def _run(self, block: Block, program: Program, *, moved: int | None) -> Ran:
        values = dict(
            zip(
                (*program.inputs, *program.params),
                (
                    *(self._input(name, moved) for name in block.inputs),
                    *(self.param(name, moved) for name in block.params),
                ),
                strict=True,
            )
        )
        taken = {name: values[name] for name in program.inputs}
        buffers = [n for n in program.params if program.tensor[n].kind == "buffer"]
        module = to_graph_module(program, _ALONE, CPU)
        run = BlockRun(module, program)
        before = {name: values[name].clone() for name in buffers}
        with self.draws():
            outputs = run.forward(values)
            self._made.setdefault(block.class_index, outputs)
            held = {name: values[name] for name in buffers}
            cotangents = tuple(
                _cotangent(block, at, out, program.tensor[name], moved)
                for at, (name, out) in enumerate(zip(program.outputs, outputs, strict=True))
            )
            input_grads, param_grads = run.backward(cotangents)
        params = {n: values[n] for n in program.params if n not in before}
        return Ran(
            values=taken | params | before,
            held=held,
            outputs=outputs,
            cotangents=cotangents,
            input_grads=input_grads,
            param_grads=param_grads,
        )

    def _input(self, name: str, moved: int | None) -> Tensor:
        if name in self._side:
            tensor = self._side[name]
        else:
            block = self._graph.blocks[self._graph.producer[name]]
            tensor = self._outputs(block.class_index)[block.outputs.index(name)]
        return tensor if moved is None else moved_by_a_unit(tensor, crc32(f"{name} in".encode()))

    def _outputs(self, class_index: int) -> tuple[Tensor, ...]:
        if class_index not in self._made:
            block = self._first[class_index]
            program = self._graph.classes[class_index].bind(self._num_samples)
            values = [self._input(name, None) for name in block.inputs]
            values += [self.param(name) for name in block.params]
            with torch.no_grad(), self.draws():
                self._made[class_index] = to_graph_module(program, _ALONE, CPU)(*values)
        return self._made[class_index]


def _cotangent(
    block: Block, at: int, output: Tensor, meta: TensorMeta, moved: int | None
) -> Tensor | None:
    if not (meta.requires_grad and output.is_floating_point()):
        return None
    seed = crc32(f"{block.class_index} {at} gradient".encode())
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    return given if moved is None else moved_by_a_unit(given, seed + moved)


def held_values(graph: ModelGraph, source: ModelSource) -> dict[str, Tensor]:
    """Return buffers and constants by name, as the model makes them, in the graph's dtypes.

    What nothing gives a value to is drawn.
    """
    metas = {t.name: t for t in graph.tensors if t.kind in ("buffer", "constant")}
    found = {name: constant(t) for name, t in metas.items() if t.data is not None}
    wanted = {name: t.fqn for name, t in metas.items() if t.data is None}
    if wanted:
        state = torch.default_generator.get_state()
        try:
            found |= _recorded(source, wanted)
        except NotReplayableError:
            module = source.build()
            found |= {name: find(module, fqn) for name, fqn in wanted.items()}
        finally:
            torch.default_generator.set_state(state)
    dtypes = {name: getattr(torch, meta.dtype) for name, meta in metas.items()}
    return {
        name: drawn(name, tuple(t.shape), dtypes[name]).contiguous()
        if t.is_meta
        else t.detach().to(dtypes[name], copy=True)
        for name, t in found.items()
    }


def _recorded(source: ModelSource, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors of the model, given by their names in it, without building all of it.

    One that nothing gives a value to stays on the meta device.
    """
    recording = record(source.build)
    tensors = {name: find(recording.module, fqn) for name, fqn in wanted.items()}
    refs = {name: recording.ref(t) for name, t in tensors.items() if t.is_meta}
    replay = Replay(recording, refs)
    refs = {name: ref for name, ref in refs.items() if replay.origin(name)}
    made = {name: torch.empty_like(tensors[name], device=CPU) for name in refs}

    def into(tensor: Tensor) -> Callable[[int, Tensor], None]:
        place = Place(Piece.whole(tensor.shape), tensor)
        return place.take

    sinks = {name: into(tensor) for name, tensor in made.items()}
    Replay(recording, refs).run(torch.default_generator.get_state(), sinks, to_the_end=False)
    return tensors | made

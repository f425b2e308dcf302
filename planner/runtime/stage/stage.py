"""The nn.Module of one stage: its blocks, each a shared program with its own parameters.

Blocks run on local tensors. Parameters are registered per block under attribute names
free of dots (`fqns` maps them back), because that is where FSDP2 shards and gathers them;
those that several blocks of the stage share are registered on the stage. With FSDP2 a
parameter in use may be a DTensor over an axis that cuts parameters; its local tensor is
taken, and autograd carries the gradient back with the parameter's own placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.language.graph import ModelGraph, written_buffers
from planner.language.layout.placements import WHOLE, Placements, moves_between
from planner.language.lowering.wiring import BlockPlacements, StageWiring
from planner.language.ops.record import is_random
from planner.language.plan import StagePlan
from planner.runtime.process.collectives import redistribute
from planner.runtime.stage.calls.opaque_modules import noting_reached, only_opaque_params
from planner.runtime.stage.calls.rows.table_lookup import ROWS
from planner.runtime.stage.host_activations import ActivationsOnHost
from planner.runtime.stage.programs import Programs, Run
from planner.runtime.stage.recompute import Keeper, Recomputed


def attribute(fqn: str) -> str:
    """Return the attribute a parameter is registered under."""
    return fqn.replace(".", "__")


class BlockModule(nn.Module):
    """One block: the class's program called with this block's parameters.

    `program` gives the class's program for a number of samples. `slots` gives, for each of
    its params, the attribute holding it here, or the position of a tensor that the stage
    passes (a shared parameter, a buffer, a constant); `written` are the positions of buffers
    that the program reads and writes. `recomputed` makes a run one that keeps little; a compiled
    program that does so by itself comes of `recomputing`, where there is one of that size, and runs
    where not all is to be kept. `away` takes activations to the host, and no parameters.
    `unreached` gives, by the program's names, the user's names of parameters that a backward may
    not reach; `reached` has those that it did, by the program's.
    `narrow_params` are attributes that ZeRO gathers in 8 bits.
    `params_are_dtensors` and `frees_params` (their memory goes when the block has run) are set by
    the code that makes it so (`planner.runtime.state.zero`).
    """

    def __init__(
        self,
        program: Callable[[int], Run],
        slots: tuple[str | int, ...],
        *,
        written: frozenset[int] = frozenset(),
        recomputed: Callable[[Run], Recomputed] | None = None,
        recomputing: Callable[[int], Run | None] | None = None,
        away: ActivationsOnHost | None = None,
        unreached: Mapping[str, str] | None = None,
        narrow_params: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.narrow_params = narrow_params
        self.programs = program, recomputing
        self._slots, self._away = slots, away
        self._written = written
        self.unreached, self.reached = unreached or {}, set[str]()
        self.params_are_dtensors = self.frees_params = False
        self.casts_whole_to: torch.dtype | None = None
        self.recomputed = None if recomputed is None else recomputed(self._with_params)

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        passed: tuple[Tensor, ...],
        num_samples: int,
        keep_all: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the block on local tensors; with `keep_all` there is no recomputation."""
        program, recomputing = self.programs
        keep_all = keep_all or not torch.is_grad_enabled()
        again = None if keep_all or recomputing is None else recomputing(num_samples)
        if self.recomputed is not None and not keep_all and again is None:
            # The second run reads what the first one read: other microbatches have written since.
            found = {position: passed[position].clone() for position in self._written}
            return self.recomputed(program(num_samples), passed, found, *inputs)
        return self._with_params(again or program(num_samples), passed, {}, *inputs)

    def _with_params(
        self,
        program: Run,
        passed: tuple[Tensor, ...],
        found: Mapping[int, Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        # Parameters are looked up here and not by the caller: when a block is recomputed
        # under FSDP2, the gathered parameter of that moment is the one to use.
        again = self.recomputed is not None and self.recomputed.again
        if again or not torch.is_grad_enabled():
            # Neither a second run nor an evaluation may move running statistics.
            before = (found.get(position, t) for position, t in enumerate(passed))
            passed = tuple(t if isinstance(t, nn.Parameter) else t.clone() for t in before)
        # (The dict is what FSDP2 swaps them in; attribute access would cost more than an op.)
        own = self._parameters
        params = [passed[slot] if isinstance(slot, int) else own[slot] for slot in self._slots]
        if self.params_are_dtensors:
            params = [_local(param) for param in params]
        if self.casts_whole_to is not None:
            params = [_cast_whole(param, self.casts_whole_to) for param in params]
        if self._away is not None:
            self._away.hold(params)
        with noting_reached(self.reached) if self.unreached else nullcontext():
            made = program(*inputs, *params)
        return _apart(made, params) if self.frees_params else made


def _apart(made: tuple[Tensor, ...], params: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Copy results that are views of parameters: other blocks read them after these have gone."""
    own = {param.untyped_storage()._cdata for param in params if param is not None}
    return tuple(t.clone() if t.untyped_storage()._cdata in own else t for t in made)


def _cast_whole(param: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what FSDP2 holds no shards of, and so does not cast from fp32, as programs take it.

    Tables of rows stay: lookups cast the rows, and find the keeper of gradients at the parameter.
    """
    is_wide = isinstance(param, nn.Parameter) and param.dtype == torch.float32
    if param is None or not is_wide or hasattr(param, ROWS):
        return param
    return param.to(dtype)


def _local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, kw_only=True)
class BlockStep:
    """How a stage calls one block.

    `inputs` are (tensor, its placements so far, those the block takes); `passed`
    the stage's own tensors that go to the block's integer slots; `free` the values no
    later block nor the stage's outputs need.
    """

    inputs: tuple[tuple[str, Placements, Placements], ...]
    passed: tuple[str, ...]
    outputs: tuple[str, ...]
    free: tuple[str, ...]


class StageModule(nn.Module):
    """A stage, called with its incoming tensors, then its side inputs, in wiring order.

    Returns the tensors of `wiring.outputs`, then the loss if the stage has it. `passed`
    holds its local buffers and constants by graph name; `is_recomputed` says that not all its
    activations are kept. `moved_once` names buffers that the last microbatch alone moves.
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        plan: StagePlan,
        wiring: StageWiring,
        placements: Callable[[int], BlockPlacements],
        params: Mapping[int, Mapping[str, str]],
        programs: Programs,
        tensors: Mapping[str, Tensor],
        groups: Mapping[str, str],
        keeper: Keeper,
        device: torch.device,
        away: ActivationsOnHost | None = None,
        moved_once: frozenset[str] = frozenset(),
    ) -> None:
        """`params` gives, by block, which of the model's tensors each param of the program is that
        this rank runs for it. `tensors` holds local weights by name, `groups` the names of the
        groups of the axes that blocks are lowered on; with selective recomputation the programs'
        kept ops listen to `keeper`. `away` is for plans with activations on the host. `moved_once`
        is that of `planner.language.across.cut.moved_once`, of the whole model.
        """
        super().__init__()
        self.wiring = wiring
        self.is_recomputed = plan.is_recomputed
        self._keeps_last = not plan.recompute_last
        self._groups = groups
        self.fqns: dict[str, str] = {}
        self._placement_of = {e.tensor: e.taken for e in wiring.incoming}
        self._placement_of |= dict.fromkeys(wiring.side_inputs, WHOLE)
        # In how many blocks of the stage each tensor is used: what several share belongs to the
        # stage, since FSDP2 gathers a parameter with one unit alone.
        uses = Counter(n for b in plan.blocks for n in dict.fromkeys(params[b].values()))
        self.passed: dict[str, Tensor] = {}
        self._shared: dict[str, str] = {}
        for name in uses:
            meta = graph.tensor[name]
            if meta.kind != "param":
                self.passed[name] = tensors[name]
            elif uses[name] > 1 and not meta.table:
                self._shared[name] = attribute(meta.fqn)
                self._register(self, meta.fqn, tensors[name], meta.requires_grad, "")
        # A table with a gradient of rows is every block's own: FSDP2 hands on copies of the rest.
        tables = {
            name: nn.Parameter(tensors[name], requires_grad=graph.tensor[name].requires_grad)
            for name in uses
            if graph.tensor[name].table
        }
        self.blocks = nn.ModuleList()
        steps = []
        again = plan.recompute_by_block
        for position, index in enumerate(plan.blocks):
            block = graph.blocks[index]
            # A class's program has names of its own; the block says which of its tensors each is.
            names = params[index]
            own = dict.fromkeys(
                n
                for n in names.values()
                if n in tables or (graph.tensor[n].kind == "param" and uses[n] == 1)
            )
            # Of the block's own parameters FSDP2 swaps the attribute; all else the stage passes by
            # position.
            passed = tuple(dict.fromkeys(n for n in names.values() if n not in own))
            slots = tuple(
                attribute(graph.tensor[n].fqn) if n in own else passed.index(n)
                for n in names.values()
            )
            recomputed = None
            # A block before the model's first trained parameter has no backward to run again for.
            has_backward = any(graph.tensor[n].requires_grad for n in block.outputs)
            recomputing = None
            if again[position] == "selective" and programs.is_compiled(block.class_index):
                recomputing = programs.recomputing(block.class_index)
            if again[position] != "none" and has_backward:
                recomputed = partial(
                    Recomputed,
                    device=device,
                    keeper=keeper if again[position] == "selective" else None,
                    away=away,
                    draws=any(is_random(op) for op in graph.classes[block.class_index].ops),
                )
            program = programs.of_class(block.class_index)
            written = frozenset(
                passed.index(names[name])
                for name in written_buffers(graph.classes[block.class_index])
            )
            narrow = programs.gathered_narrow(block.class_index)
            optional = only_opaque_params(graph.classes[block.class_index])
            module = BlockModule(
                program,
                slots,
                written=written,
                recomputed=recomputed,
                recomputing=recomputing,
                away=away,
                unreached={
                    inner: graph.tensor[name].fqn
                    for inner, name in names.items()
                    if inner in optional and name in own
                },
                narrow_params=frozenset(
                    attribute(graph.tensor[name].fqn)
                    for inner, name in names.items()
                    if inner in narrow and name in own
                ),
            )
            for n in own:
                meta = graph.tensor[n]
                tensor = tables.get(n, tensors[n])
                self._register(module, meta.fqn, tensor, meta.requires_grad, f"blocks.{position}.")
            self.blocks.append(module)
            takes, _, makes = placements(index)
            steps.append(
                BlockStep(
                    inputs=tuple(
                        (n, self._placement_of[n], p)
                        for n, p in zip(block.inputs, takes, strict=True)
                    ),
                    passed=passed,
                    outputs=block.outputs,
                    free=(),
                )
            )
            # Blocks are walked in order, so this has where each value lies when the next block
            # takes it.
            self._placement_of |= dict(zip(block.outputs, makes, strict=True))
        self._moved_once = moved_once.intersection(self.passed)
        # Outputs leave in the placement in which their edge is sent; the loss is whole.
        results = [*wiring.outputs, *([(graph.loss, WHOLE)] if wiring.has_loss else [])]
        self._results = tuple((n, self._placement_of[n], p) for n, p in results)
        self._steps = _with_frees(steps, {n for n, _ in results})
        self._inputs = (*(e.tensor for e in wiring.incoming), *wiring.side_inputs)

    def _register(
        self, module: nn.Module, fqn: str, tensor: Tensor, requires_grad: bool, prefix: str
    ) -> None:
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=requires_grad)
        module.register_parameter(attribute(fqn), tensor)
        self.fqns[prefix + attribute(fqn)] = fqn

    def forward(
        self,
        *inputs: Tensor,
        num_samples: int,
        is_last: bool = False,
        after_first: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the stage on one microbatch, of which this rank has `num_samples`; `is_last` says
        that it is the step's last. `after_first` is called when the first block has run.
        """
        keep_all = is_last and self._keeps_last
        # `values` alone holds the tensors: a reference left in this frame would keep memory that
        # the steps' `free` gives back.
        values = dict(zip(self._inputs, inputs, strict=True))
        del inputs
        held = dict(self.passed)
        if not is_last:
            # What a microbatch writes here the next one must not find, and the last one leaves.
            held |= {name: self.passed[name].clone() for name in self._moved_once}
        # Looked up at each call: FSDP2 puts the gathered parameter in the shard's place.
        held |= {name: getattr(self, attr) for name, attr in self._shared.items()}
        for block, step in zip(self.blocks, self._steps, strict=True):
            taken = tuple(self._as(values[name], src, dst) for name, src, dst in step.inputs)
            made = block(taken, tuple(held[name] for name in step.passed), num_samples, keep_all)
            del taken
            values.update(zip(step.outputs, made, strict=True))
            for name in step.free:
                del values[name]
            if after_first is not None:
                after_first()
                after_first = None
        return tuple(self._as(values[name], src, dst) for name, src, dst in self._results)

    def _as(self, tensor: Tensor, src: Placements, dst: Placements) -> Tensor:
        """Redistribute between blocks, one axis after the other."""
        if src == dst:
            return tensor
        for axis, before, after in moves_between(src, dst):
            tensor = redistribute(tensor, self._groups[axis], str(before), str(after), False)
        return tensor

    def take_again(self) -> Callable[[], None] | None:
        """Return what makes the last block's tensors again: its backward will begin with it.

        Call it right after `forward`. None where nothing is recomputed, or the block's
        parameters are gathered (ZeRO 3) only when its backward begins.
        """
        block = self.blocks[-1]
        assert isinstance(block, BlockModule)
        return (
            None
            if block.recomputed is None or _is_sharded(block)
            else (block.recomputed.take_latest())
        )

    def may_be_unreached(self) -> Iterator[str]:
        """Yield the user's names of parameters that a backward may not reach."""
        for block in self._blocks():
            yield from block.unreached.values()

    def reached(self) -> Iterator[str]:
        """Yield those of them that one did since `forget_reached`."""
        for block in self._blocks():
            yield from (fqn for name, fqn in block.unreached.items() if name in block.reached)

    def forget_reached(self) -> None:
        """Forget what backwards have reached."""
        for block in self._blocks():
            block.reached.clear()

    def _blocks(self) -> Iterator[BlockModule]:
        for block in self.blocks:
            assert isinstance(block, BlockModule)
            yield block

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return the stage's parameters by the user's own names."""
        return {self.fqns[name]: param for name, param in self.named_parameters()}


def _is_sharded(block: BlockModule) -> bool:
    return any(isinstance(param, DTensor) for param in block.parameters())


def _with_frees(steps: list[BlockStep], kept: set[str]) -> tuple[BlockStep, ...]:
    """Give each step the values that die after it."""
    result: list[BlockStep] = []
    # From the last step: a value dies with the last step that touches it.
    later = set(kept)
    for step in reversed(steps):
        touched = dict.fromkeys((*(n for n, _, _ in step.inputs), *step.outputs))
        free = tuple(n for n in touched if n not in later)
        result.append(
            BlockStep(inputs=step.inputs, passed=step.passed, outputs=step.outputs, free=free)
        )
        later.update(touched)
    return tuple(reversed(result))

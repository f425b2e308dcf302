"""Which job runs what of a captured model: every op and every gradient is in one kind of job.

| work | job |
|---|---|
| a captured op; the preamble's are run ahead of the first forwards that read them | F |
| its gradients | B; or I |
| the weight gradient of a product, which may be deferred | B; or W |
| the update of a parameter | O |

A stage's backwards are either B, or I and W. With ZeRO over several replicas I makes all
gradients (decision 6). Learning-rate jobs run no captured op.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from planner.language.graph import ModelGraph, Program
from planner.language.ops.call import ProductArgs
from planner.language.ops.weight_products import deferrable_products
from planner.language.plan import Plan
from planner.language.plan.replication import Replication
from planner.language.schedule.jobs import JobKind, Schedule
from planner.language.schedule.step_jobs import StepJobKind

PREAMBLE = "preamble"


class Work(NamedTuple):
    """A piece of a captured model's training step.

    `part` is ``forward``, ``gradients`` (an op's that are made together), ``input gradient``,
    ``weight gradient`` or ``update``; `block` the name of the op's block, or `PREAMBLE`; `name` the
    op's, of an update the parameter's.
    """

    part: str
    block: str
    name: str


WorkOfJobs = dict[tuple[JobKind | StepJobKind, int], tuple[Work, ...]]
"""What each job of a kind and a stage does for one microbatch; of O and L, of a pp rank in a step.
"""


def work_of_jobs(graph: ModelGraph, plan: Plan, schedule: Schedule) -> WorkOfJobs:
    """Return what each kind of job does of a captured model, by stage (O and L: by pp rank).

    Only kinds of job that a stage has are there.
    """
    found: WorkOfJobs = {}
    for stage, kinds in _kinds_of_stages(schedule).items():
        blocks = [graph.blocks[index] for index in plan.stages[stage].blocks]
        programs = [(block.name, graph.classes[block.class_index]) for block in blocks]
        read = tuple(dict.fromkeys(name for block in blocks for name in block.inputs))
        made = tuple(name for name in read if name in graph.preamble.outputs)
        found[JobKind.FORWARD, stage] = tuple(
            Work("forward", name, op.name)
            for name, program in ((PREAMBLE, graph.preamble.only(made)), *programs)
            for op in program.ops
        )
        pairs = [_gradients(name, program) for name, program in programs]
        inputs, weights = (tuple(chain.from_iterable(each)) for each in zip(*pairs, strict=True))
        if JobKind.FULL_BACKWARD in kinds:
            found[JobKind.FULL_BACKWARD, stage] = (*inputs, *weights)
        if JobKind.BACKWARD_INPUT in kinds:
            defers = not Replication.of(plan, stage).is_sharded
            at_once = () if defers else weights
            found[JobKind.BACKWARD_INPUT, stage] = (*inputs, *at_once)
            found[JobKind.BACKWARD_WEIGHT, stage] = weights if defers else ()
    for rank in range(schedule.pp):
        held = {
            name: Work("update", graph.blocks[index].name, graph.tensor[name].fqn)
            for stage in schedule.stages_of(rank)
            for index in plan.stages[stage].blocks
            for name in graph.blocks[index].params
            if graph.tensor[name].kind == "param" and graph.tensor[name].requires_grad
        }
        found[StepJobKind.OPTIMIZER, rank] = tuple(held.values())
        found[StepJobKind.LEARNING_RATE, rank] = ()
    return found


def _gradients(block: str, program: Program) -> tuple[list[Work], list[Work]]:
    """Return the gradients that the input's gradient needs, and those that may be deferred."""
    products = deferrable_products(program)
    late = _made_for_weights(program, products)
    at_once, deferred = [], []
    for op in program.ops:
        if op.name in products:
            if program.tensor[products[op.name][0].name].requires_grad:
                at_once.append(Work("input gradient", block, op.name))
            deferred.append(Work("weight gradient", block, op.name))
        elif any(program.tensor[name].requires_grad for name in op.outputs):
            (deferred if op.name in late else at_once).append(Work("gradients", block, op.name))
    return at_once, deferred


def _made_for_weights(program: Program, products: Mapping[str, ProductArgs]) -> set[str]:
    """Return the ops that make weights of products from parameters, such as a transpose.

    Their gradients follow from the weights', which may come late; those of an op of which anything
    else reads a result do not.
    """
    late: set[str] = set()
    read_at_once = set(program.outputs)
    # Last op first: all that reads an op's results has been seen.
    for op in reversed(program.ops):
        if op.name in products:
            # The gradient of the product's input is made at once, that of its weight late.
            read_at_once.add(products[op.name][0].name)
        elif read_at_once.isdisjoint(op.outputs):
            late.add(op.name)
        else:
            read_at_once.update(op.inputs)
    return late


def _kinds_of_stages(schedule: Schedule) -> dict[int, set[JobKind]]:
    kinds: dict[int, set[JobKind]] = {stage: set() for stage in range(schedule.num_stages)}
    for row in schedule.jobs:
        for job in row:
            kinds[job.stage_index].add(job.kind)
    return kinds

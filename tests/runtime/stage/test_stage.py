"""A block with its own parameters, and the values a stage lets go of between blocks."""

from __future__ import annotations

import torch
from torch import nn

from planner.runtime.stage.stage import BlockModule, BlockStep, _with_frees, attribute


def test_attributes_have_no_dots():
    assert attribute("layers.3.fc.weight") == "layers__3__fc__weight"


def counted(num_samples: int):
    """A program that writes into a buffer, as BatchNorm does, and returns x * w + count."""

    def run(x, weight, buffer):
        buffer += num_samples
        return (x * weight + buffer,)

    return run


def test_a_block_takes_its_own_parameters_and_what_the_stage_passes():
    block = BlockModule(counted, ("w", 0))
    block.register_parameter("w", nn.Parameter(torch.full((1,), 3.0)))
    buffer = torch.zeros(1)
    (y,) = block((torch.ones(1),), (buffer,), 5)
    assert (y.item(), buffer.item()) == (8.0, 5.0)
    with torch.no_grad():  # an evaluation leaves running statistics as they are
        (y,) = block((torch.ones(1),), (buffer,), 5)
    assert (y.item(), buffer.item()) == (13.0, 5.0)


class Twice:
    """Runs a block's program again as a backward does, with what the first run found."""

    def __init__(self, run) -> None:
        self.run, self.again = run, False

    def __call__(self, num_samples, passed, found, *inputs):
        first = self.run(num_samples, passed, found, *inputs)
        passed[0].fill_(100.0)  # other microbatches write in the meantime
        self.again = True
        second = self.run(num_samples, passed, found, *inputs)
        self.again = False
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return first


def test_a_second_run_reads_the_buffers_that_the_first_one_read():
    block = BlockModule(counted, ("w", 0), written=frozenset((0,)), recomputed=Twice)
    block.register_parameter("w", nn.Parameter(torch.ones(1)))
    buffer = torch.zeros(1)
    block((torch.ones(1),), (buffer,), 5)
    assert buffer.item() == 100.0  # and leaves them alone
    block((torch.ones(1),), (buffer,), 5, keep_all=True)
    assert buffer.item() == 105.0  # without recomputation there is one run


def test_a_compiled_program_makes_again_where_there_is_one_of_the_size():
    """Of other sizes the block runs twice, as it does eagerly."""
    called: list[str] = []

    def named(name):
        return lambda *tensors: (called.append(name), tensors)[1]

    class Told(Twice):
        def __call__(self, *given):
            called.append("twice")
            return self.run(*given)

    block = BlockModule(
        lambda _: named("eager"),
        (),
        recomputed=Told,
        recomputing={5: named("compiled")}.get,
    )
    for size, keep_all in ((5, False), (4, False), (5, True)):
        block((torch.ones(1),), (), size, keep_all=keep_all)
    with torch.no_grad():
        block((torch.ones(1),), (), 5)
    assert called == ["compiled", "twice", "eager", "eager", "eager"]


def test_values_are_freed_after_their_last_reader():
    def step(inputs: str, outputs: str) -> BlockStep:
        read = tuple((name, None, None) for name in inputs)
        return BlockStep(inputs=read, passed=(), outputs=tuple(outputs), free=())

    steps = _with_frees([step("a", "bc"), step("ab", "d"), step("d", "e")], {"e", "c"})
    assert [s.free for s in steps] == [(), ("a", "b"), ("d",)]

"""Runs that are alike are priced once: a chain's repetition, and that no run costs otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from search import SearchRequest
from search.candidates import Candidates
from search.partition.chain_windows import Repetition, Window
from search.stages.rank_stages import RankStages
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

WHOLE = "abcabcabcx"


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        ("xaaaaaay", (1, 7, 1)),
        ("xxababababy", (2, 10, 2)),
        (WHOLE, (0, 9, 3)),
        ("abcdefghij", (0, 0, 1)),
        ("a", (0, 0, 1)),
    ],
)
def test_repetition_found(chain, found):
    """M17: the longest part of a chain that repeats itself, blocks in turn included."""
    repetition = Repetition(np.array([ord(letter) for letter in chain]))
    assert (repetition.first, repetition.last, repetition.period) == found


def test_every_run_is_one_of_its_kind():
    """M17: a run and the one that stands for its kind are made of the same blocks in order, and
    kinds grow with the length of a chain while its runs grow with the square."""
    counts = {}
    for repeats in (10, 20):
        chain = "x" + "ab" * repeats + "yz"
        repetition = Repetition(np.array([ord(letter) for letter in chain]))
        window = Window.all_runs(len(chain), len(chain))
        kinds = repetition.kinds(window)
        for row, column in np.argwhere(window.valid).tolist():
            start, end = column, int(window.end[row, column])
            kind = kinds.of[row, column]
            assert chain[start:end] == chain[kinds.start[kind] : kinds.end[kind]]
        counts[repeats] = len(kinds.start)
    assert counts[20] < 2.2 * counts[10] < len(chain) ** 2 / 4


@pytest.mark.parametrize("zero", [0, 3])
def test_costs_of_kinds_are_those_of_runs(zero):
    """M17: the costs of a window are the same whether equal runs are told apart or not."""
    model = tiny_models()["gpt"]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name="gpt"
    )
    request = SearchRequest(num_devices=4, global_batch=8)
    candidates = Candidates.of(graph, Machine(devices_per_node=4), request)
    shape = next(
        shape for shape in candidates.shapes(request) if shape.tp == 2 and shape.batch_parts == 2
    )
    table = candidates.tables(2, shape.microbatch_size)[0]
    configuration = replace(next(shape.configurations()), zero=zero)
    stages = RankStages(table=table, configuration=configuration, is_mixed=True)
    window = Window.all_runs(table.num_blocks, table.num_blocks)
    folded = stages.cost_window(window)
    assert folded.kinds.start.size < window.valid.sum()
    table._kinds.clear()
    table._stage_costs.clear()
    table.repetition = Repetition(np.arange(table.num_blocks))
    plain = stages.cost_window(window)
    assert plain.kinds.start.size >= window.valid.sum()
    for name in ("forward_s", "backward_s", "tail_s"):
        mine, theirs = (np.where(window.valid, getattr(b, name), 0) for b in (folded, plain))
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, err_msg=name)
    for choice in range(3):
        mine, theirs = (
            np.where(window.valid, b.least_bytes(2, choice), 0) for b in (folded, plain)
        )
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)

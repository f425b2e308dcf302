"""Issue 19, 7: an exchange takes as long as its slowest rank, at its best; of a message one way.

Each rank has a clock that its exchanges move on: the machine's load is no part of what is told.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from planner.language.lowering.defaults import default_plan
from planner.language.templates import Transformer, build_transformer
from planner.runtime.preflight import timing
from planner.runtime.preflight.exchanges import Exchange
from planner.runtime.process.groups.mesh import build_mesh
from tests.spawn import run_ranks

KIB = 1024
SLOW_S, BUSY_S = 0.02, 0.2
REDUCE, GATHER = (
    Exchange(axis="data", kind=kind, ranks=(0, 1, 2)) for kind in ("all_reduce", "all_gather")
)
MESSAGE = Exchange(axis="pp", kind="send_recv", ranks=(0, 1))


def timed_with_delays():
    """What each rank is told of three rounds, by how exchanges move its clock on; and a broken
    one."""
    graph = build_transformer(
        Transformer(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, seq_len=8)
    )
    mesh = build_mesh(default_plan(graph, dp=3), torch.device("cpu"))
    timing.SIZES, timing.LONG_S = (4 * KIB, 24 * KIB), 60.0
    now_s = 0.0
    timing.time = SimpleNamespace(perf_counter=lambda: now_s)
    calls: Counter[str] = Counter()
    sent = []

    def delayed(name, plain):
        def run(*args, **options):
            nonlocal now_s
            calls[name] += 1
            sent.append((name, args[0].nbytes))
            # The last rank is slow in all calls, and now and then busy with something else.
            # (Who receives a message waits for its way.)
            is_slow = dist.get_rank() == 2 and options.get("group") is not None
            if name in ("send", "recv") or is_slow:
                now_s += BUSY_S if calls[name] % 3 == 0 else SLOW_S
            return plain(*args, **options)

        return run

    for name in ("all_reduce", "all_gather_into_tensor", "send", "recv"):
        setattr(dist, name, delayed(name, getattr(dist, name)))
    found = [timing.time_round((each,), mesh) for each in (REDUCE, GATHER, MESSAGE)]
    bytes_sent = {name: {size for each, size in sent if each == name} for name, _ in sent}
    timing.LONG_S = 0.0  # the first size is the last
    found.append(timing.time_round((REDUCE,), mesh))
    rank = dist.get_rank()
    agreed = [timing._least_of_slowest([1.0 + rank, 5.0 - rank], REDUCE, mesh)]
    if rank in MESSAGE.ranks:
        agreed.append(timing._least_of_slowest([1.0 + rank, 5.0 - rank], MESSAGE, mesh))
    unknown = Exchange(axis="data", kind="shout", ranks=(0, 1, 2))
    refused = []
    for fails in (unknown, REDUCE):
        try:
            dist.all_reduce = broken
            timing.time_round((fails,), mesh)
        except (ValueError, RuntimeError) as error:
            refused.append(str(error))
    return found, bytes_sent, refused, agreed


def broken(*args, **options):
    raise RuntimeError("[gloo/pair.cc:12] connection reset\nby peer")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(timed_with_delays, 3)


@pytest.mark.parametrize("number", [0, 1])
def test_the_slowest_rank_s_best_call_counts_on_all_ranks(ranks, number):
    """Rank 2 alone is late; that it was busier in some calls is no part of the link's time."""
    told = [found[number] for found, *_ in ranks]
    assert told[0] == told[1] == told[2]
    ((exchange, num_bytes, seconds),) = told[0]
    assert (exchange, num_bytes) == ((REDUCE, GATHER)[number], 24 * KIB)
    assert seconds == pytest.approx(SLOW_S)


def test_ranks_agree_on_the_best_call_of_the_slowest_or_of_who_has_its_message_back(ranks):
    """Calls take 1, 2, 3 s and 5, 4, 3 s: by then all are done after 3 s and 5 s."""
    assert [agreed for *_, agreed in ranks] == [[3.0, 1.0], [3.0, 1.0], [3.0]]


def test_a_message_takes_half_of_its_way_there_and_back(ranks):
    """Each way waits as long; a rank that exchanges nothing is told nothing."""
    first, second, third = (found[2] for found, *_ in ranks)
    assert first == second
    assert third == []
    ((exchange, num_bytes, seconds),) = first
    assert (exchange, num_bytes) == (MESSAGE, 24 * KIB)
    assert seconds == pytest.approx(SLOW_S)


def test_sizes_are_those_of_the_whole_tensor(ranks):
    sizes = {4 * KIB // 12 * 12, 24 * KIB}  # in as many equal pieces as ranks
    for _, sent, *_ in ranks:
        assert sizes <= sent["all_reduce"]
        assert sizes == sent["all_gather_into_tensor"]
    assert {4 * KIB, 24 * KIB} <= ranks[0][1]["send"]


def test_a_size_that_takes_long_is_the_last(ranks):
    ((_, num_bytes, _),) = ranks[0][0][3]
    assert num_bytes == 4 * KIB


def test_an_exchange_that_fails_is_named_with_its_ranks(ranks):
    for _, _, refused, _ in ranks:
        assert refused == [
            "exchange 'shout' is unknown",
            "all_reduce of the data group of ranks 0, 1, 2: connection reset",
        ]

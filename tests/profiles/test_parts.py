"""What single parts of `profiles` promise, by numbers computed by hand."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from planner.errors import ProfileError
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.units import GIB
from profiles import catalog
from profiles.devices import profile_for_gpu, shipped_for_gpu, shipped_profile
from profiles.lookup.memory import ROUNDS, allocator_overheads
from profiles.lookup.wire import wire_share
from profiles.measure import session, worker
from profiles.measure.nodes import launchers
from profiles.measure.probes import is_measurable, probe_of
from profiles.measure.summary import throttled
from profiles.measure.timing import sustained_timing
from profiles.measure.timing.calls import Arena, Calls, Functions
from profiles.measure.timing.clock import Clock
from profiles.measure.timing.collective_timing import time_collective
from profiles.measure.timing.host_timing import time_host_work
from profiles.measure.timing.overlap_timing import _slowed
from profiles.measure.timing.step_timing import _WORK
from profiles.profile import PASSES
from profiles.records import Group, HostWork, StepFit, WaitFit
from tests.profiles import samples
from tests.sharding.op_cases import CASES
from tests.spawn import run_ranks

CPU = torch.device("cpu")


# Finding a profile


def test_another_link_slows_messages_between_nodes_only():
    """`NAME@LINK`: beta by the ratio of the links' rates; inside a node nothing changes."""
    whole = catalog.load_profile("h100-sxm5-80gb")
    (suffix, *_) = sorted(whole.file.cluster.other_inter_node)
    other = catalog.load_profile(f"h100-sxm5-80gb@{suffix}")
    link = whole.file.cluster.other_inter_node[suffix]
    slower = link.beta_s_per_byte.value / whole.file.cluster.inter_node.beta_s_per_byte.value
    inside, between = (
        [p.collective_seconds("all_gather", 1e12, group).seconds for p in (whole, other)]
        for group in (
            Group(ranks_per_node=8, num_nodes=1), Group(ranks_per_node=1, num_nodes=64)
        )
    )  # fmt: skip
    assert inside[0] == inside[1]
    assert between[1] / between[0] == pytest.approx(slower, rel=0.05)
    with pytest.raises(ProfileError, match=f"no inter-node link 'tin'; use one of: .*{suffix}"):
        catalog.load_profile("h100-sxm5-80gb@tin")


@pytest.mark.parametrize(
    ("gpu", "name", "says"),
    [
        (None, catalog.FALLBACK, "this machine has no profile of its own; assuming"),
        ("Nosuch 3000", catalog.FALLBACK, "no shipped profile is of Nosuch 3000; assuming"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb", "using the shipped a100-sxm4-80gb"),
        ("NVIDIA H100 PCIe", "h100-sxm5-80gb scaled to H100 PCIe", "'s data sheet for NVIDIA H100"),
    ],
)
def test_without_a_profile_of_its_own(monkeypatch, tmp_path, gpu, name, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "_gpu_name", lambda: gpu)
    found, note = catalog.default_profile()
    assert found.name == name
    assert says in note


@pytest.mark.parametrize(
    ("gpu", "shipped"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_a_variant_with_a_data_sheet_is_not_the_shipped_device(gpu, shipped):
    assert shipped_for_gpu(gpu) == shipped
    found = profile_for_gpu(gpu)
    assert found is not None
    assert (found.name == shipped) == (shipped is not None)


def test_a_data_sheet_scales_its_reference_profile():
    """H100 NVL: 835 of 989.4 TFLOP/s, 3.9 of 3.35 TB/s, 300 of 450 GB/s, 94 GB."""
    whole, made = shipped_profile("h100-sxm5-80gb"), profile_for_gpu("NVIDIA H100 NVL")
    assert made.cluster.peak_flop_per_s["bfloat16"].value == pytest.approx(835e12)
    assert made.cluster.memory_bytes.value == pytest.approx(93.6 * GIB, rel=0.01)
    assert made.cluster.intra_node.beta_s_per_byte.value == pytest.approx(1 / 300e9)
    for before, after in zip(whole.op_fits, made.op_fits, strict=True):
        assert after.s_per_flop == pytest.approx(before.s_per_flop * 989.4 / 835)
        assert after.s_per_byte == pytest.approx(before.s_per_byte * 3.35 / 3.9)
    assert made.launch_overhead_s == whole.launch_overhead_s


# A profile's answers


def test_a_host_takes_longer_for_products_and_redistributions_where_that_was_measured():
    """5 ops, 2 products and a redistribution: 1 us each; or 2 us, and 8 and 28 us more."""
    plain = samples.profile(launch_overhead_s=samples.figure(1e-6))
    for direction in ("forward", "backward"):
        found = plain.host_seconds(direction, ops=5, products=2, redistributions=1)
        assert found == 5 * plain.launch_overhead_s
    work = {"backward_op": 2e-6, "product_backward": 1e-5, "redistribute_backward": 3e-5}
    host_work = {kind: samples.figure(seconds) for kind, seconds in work.items()}
    measured = samples.profile(launch_overhead_s=samples.figure(1e-6), host_work=host_work)
    counts = {"ops": 5, "products": 2, "redistributions": 1}
    assert measured.host_seconds("forward", **counts) == 5 * measured.launch_overhead_s
    assert measured.host_seconds("backward", **counts) == pytest.approx(10e-6 + 16e-6 + 28e-6)


def test_clocks_that_are_held_back_are_a_finding():
    free = {"rank": 0, "sm_mhz": 1980.0, "most_sm_mhz": 1980.0, "power_w": 500.0, "throttled": ()}
    held = free | {"sm_mhz": 1410.0, "power_w": 700.0, "throttled": ("power",)}
    assert throttled([]) == throttled([free] * 20) == throttled([held, *[free] * 40]) == []
    assert throttled([held, *[free] * 3, *[free | {"rank": 1}] * 4]) == [
        "rank 0: held back by power in 1 of 4 visits; clocks of 1410 to 1980 MHz, "
        "of 1980 possible; up to 700 W"
    ]


def test_work_under_load_is_timed_to_its_end(monkeypatch):
    """A made-up device that slows by a fifth after 4 samples of a chain."""
    calls = iter(range(1000))
    clock = SimpleNamespace(
        device=torch.device("cpu"),
        time=lambda work: (1.0 if next(calls) < sustained_timing.SHORT_SAMPLES else 9.6, work()),
    )
    monkeypatch.setattr(sustained_timing, "GAP_S", 0.0)
    found = sustained_timing.time_sustained(clock, seconds=0.0)
    assert found == {"short": [1.0], "sustained": [pytest.approx(1.2)]}


def _hosts() -> dict:
    import torch.distributed as dist

    return time_host_work(torch.device("cpu"), dist.group.WORLD.group_name)


def test_a_host_s_work_is_timed_forward_and_backward():
    """Of a redistribution more than of an op, in both directions."""
    (found,) = run_ranks(_hosts, 1)
    assert set(found) == set(get_args(HostWork))
    assert all(seconds > 0 for samples in found.values() for seconds in samples)
    assert min(found["redistribute_forward"]) > min(found["forward_op"])
    assert min(found["redistribute_backward"]) > min(found["backward_op"])


def _groups(own_groups: bool) -> tuple[int, int]:
    import torch.distributed as dist

    worker.p2p_needs_own_groups = lambda device: own_groups
    rank = SimpleNamespace(rank=dist.get_rank(), device=torch.device("cpu"), _plan_groups={})
    for _ in range(2):  # a second look opens no more
        worker.Worker._open_groups_of_a_plan(rank)
    mine = [
        group for group in rank._plan_groups.values() if group != dist.GroupMember.NON_GROUP_MEMBER
    ]
    return len(rank._plan_groups), len(mine)


@pytest.mark.parametrize(
    ("ranks", "own_groups", "made", "mine"), [(2, False, 2, 2), (2, True, 4, 4), (3, True, 8, 6)]
)
def test_memory_is_measured_with_the_groups_of_a_plan(ranks, own_groups, made, mine):
    """tp, data, and with each of the neighbours one for each direction."""
    assert run_ranks(_groups, ranks, own_groups) == [(made, mine)] * ranks


def test_ranks_of_a_measurement_have_the_environment_of_training_ranks(monkeypatch):
    started = []
    monkeypatch.setattr(launchers, "rank_environment", lambda *_: {"ALLOCATOR": "as in training"})
    monkeypatch.setattr(launchers.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    launchers.LocalLauncher(2, device="cpu", threads=1).start(1, "token", None)
    assert [env["ALLOCATOR"] for env in started] == ["as in training"] * 2
    assert [env["OMP_NUM_THREADS"] for env in started] == ["1"] * 2


def test_ranks_wait_for_each_other_at_collectives():
    """3 collectives in 2 s of compute: 3 x (1 ms + 4 ms inside a block) + 2 s x 10%."""
    wait = WaitFit(
        s_per_call=1e-3, s_per_redistribution=4e-3, s_per_compute_s=0.1, origin="fitted", detail="-"
    )
    profile = samples.profile(collective_wait=wait)
    assert profile.wait_seconds(2.0, 3, inside=True) == pytest.approx(0.215)
    assert profile.wait_seconds(2.0, 3) == pytest.approx(0.203)
    assert profile.wait_seconds(2.0, 0) == 0.0
    assert samples.profile().wait_seconds(2.0, 3) == 0.0


def test_unmeasured_work_of_a_step_is_passes_over_memory():
    """At 10 GB/s: AdamW crosses memory 7 times; what was measured is taken instead."""
    profile = samples.profile()
    assert PASSES["adamw"] == 7
    found = profile.optimizer_seconds(param_bytes=1e9, num_tensors=3)
    assert found.seconds == pytest.approx(0.7)
    assert profile.step_seconds("zero_reduce", num_bytes=1e9).seconds == 0
    fit = StepFit(
        work="adamw", s_per_tensor=0.25, s_per_byte=1e-9, relative_error=0.1,
        origin="fitted", detail="-",
    )  # fmt: skip
    measured = samples.profile(step_fits=(fit,))
    found = measured.optimizer_seconds(param_bytes=1e9, num_tensors=3)
    assert found.seconds == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0)],
)
def test_share_of_a_tensor_on_each_link_of_a_ring_of_four(kind, share):
    assert wire_share(kind, 4) == share


def test_no_message_of_a_group_is_cheaper_by_byte_than_the_least():
    """What the search's bounds rest on."""
    records = [
        samples.collective_record("all_gather", size, 1e-5 + size * rate, ranks_per_node=4)
        for size, rate in ((1 << 10, 1e-9), (1 << 16, 3e-9), (1 << 20, 2e-9))
    ]
    profile, group = samples.profile(collectives=records), Group(ranks_per_node=4, num_nodes=1)
    for most in (1 << 8, 1 << 14, 1 << 18, 1 << 24):
        least = profile.least_collective_s_per_byte("all_gather", group, most_bytes=most)
        sizes = [most * 0.7**k for k in range(30)]
        found = [profile.collective_seconds("all_gather", n, group).seconds / n for n in sizes]
        assert 0 < least <= min(found) * (1 + 1e-12)


def test_memory_held_is_compared_with_live_tensors(monkeypatch):
    """An allocator that holds a quarter more than is alive has an overhead of 25%."""
    alive = [0]
    make = torch.ones

    def ones(count: int, **options):
        tensor = make(count, **options)
        alive[0] += count
        weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - count))
        return tensor

    monkeypatch.setattr("profiles.lookup.memory.LIVE_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr("profiles.lookup.memory.used_bytes", lambda device: 1.25 * alive[0])
    assert allocator_overheads(CPU) == pytest.approx([0.25] * ROUNDS)


# Probes


def linear() -> tuple[Op, dict[str, TensorMeta]]:
    def meta(*shape: int) -> TensorMeta:
        return TensorMeta(
            name="", kind="activation", shape=shape, dtype="float32", requires_grad=True
        )

    op = Op(
        name="layer", target="aten.linear.default", args=(Ref("x"), Ref("w")), kwargs=(),
        outputs=("y",), module="net.0",
    )  # fmt: skip
    return op, {"x": meta(4, 8), "w": meta(2, 8), "y": meta(4, 2)}


def test_a_probe_is_of_forms_and_not_of_names():
    """2 x 4 x 2 x 8 flop; equal ops of two modules are measured once."""
    op, tensors = linear()
    probe = probe_of(op, tensors)
    assert probe.forward.shapes == ((4, 8), (2, 8))
    assert probe.forward.flop == 2 * 4 * 2 * 8
    assert probe.backward is not None
    assert probe.backward.flop == 2 * probe.forward.flop
    renamed = {"a": tensors["x"], "b": tensors["w"], "c": tensors["y"]}
    other = Op(
        name="other", target=op.target, args=(Ref("a"), Ref("b")), kwargs=(), outputs=("c",),
        module="net.1",
    )  # fmt: skip
    assert probe_of(other, renamed).key == probe.key


def test_calls_take_their_inputs_from_memory_in_turn():
    """So that weights are as cold as in training; `stay_warm` is the opposite."""
    arena = Arena(CPU)
    arena.num_bytes = 4096
    op, tensors = linear()
    made = Calls.of(probe_of(op, tensors).to_json(), arena, Functions(CPU))
    weights = [call[0][1].data_ptr() for call in made._calls]
    assert len(set(weights)) == 4096 // 512  # each input begins at 256 bytes
    results = made.forward(3)
    assert [tuple(result.shape) for result in results] == [(4, 2)] * 3
    made.backward(results)
    made.stay_warm()
    assert len({call[0][1].data_ptr() for call in made._calls}) == 1


def probed(name):
    """The calls of a case of the sharding tests, and the values that its first one is given."""
    single = CASES[name](random.Random(name), 2)
    program = single.program
    made = Calls.of(probe_of(single.op, program.tensor).to_json(), Arena(CPU), Functions(CPU))
    return made, single, made._calls[0][0]


@pytest.mark.parametrize(
    "name", ["sort_rows", "unsort_rows", "bias_of_runs", "stack_of_runs", "product_of_runs"]
)
def test_rows_of_experts_are_timed_as_training_runs_them(name):
    """They need no group of ranks; results are those shapes, and gradients are made."""
    made, single, _ = probed(name)
    (found,) = made.forward(1)
    shapes = [single.program.tensor[output].shape_at(1) for output in single.op.outputs]
    assert [tuple(result.shape) for result in found] == shapes
    made.backward([found])


def test_made_up_numbers_are_such_as_an_op_takes():
    """Experts there are, an order of all rows, runs of as many rows as on average."""
    _, single, (_, experts) = probed("sort_rows")
    assert int(experts.max()) < single.op.args[2]
    _, _, (rows, order, _) = probed("unsort_rows")
    assert sorted(order.tolist()) == list(range(len(rows)))
    _, _, (rows, matrices, ends) = probed("product_of_runs")
    each = len(rows) / len(matrices)
    assert ends.tolist() == [int(each * (at + 1)) for at in range(len(matrices))]


def test_what_a_measuring_process_can_run():
    """Not what asks other ranks, and no code of the model's own."""
    told = {
        "planner.sort_rows": ("x", 4),
        "planner.redistribute": ("x", "tp", "P", "R", True),
        OPAQUE_MODULE: ("Experts@1f0c9a2b", ("x",)),
    }
    ops = [Op(name="op", target=target, args=args, outputs=("y",)) for target, args in told.items()]
    assert [is_measurable(op) for op in ops] == [True, False, False]


def test_a_wide_head_has_gradients_at_full_speed():
    """A saturated softmax has subnormal ones, by which CPUs multiply many times slower."""
    arena, rows, width, classes = Arena(CPU), 256, 1024, 256
    x = arena.take(torch.float32, rows * width, at_byte=0).view(rows, width)
    weight = arena.take(torch.float32, classes * width, at_byte=x.nbytes).view(classes, width)
    logits = torch.nn.functional.linear(x, weight).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(classes, (rows,)))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().min() > torch.finfo(torch.float32).tiny


def answer(node: str, device: str, memory_bytes: float, *, shares: bool) -> dict:
    return {
        "node": node, "device": device, "memory_bytes": memory_bytes, "shares_memory": shares,
        "driver": "none", "torch": "2",
    }  # fmt: skip


def test_ranks_on_cpu_share_the_memory_of_their_node():
    shared = session.Ranks(about=tuple(answer(n, "cpu", 12.0, shares=True) for n in "aab"))
    assert shared.memory_bytes == 6.0
    assert shared.nodes == ((0, 1), (2,))
    own = session.Ranks(about=tuple(answer("a", kind, 12.0, shares=False) for kind in "xyy"))
    assert own.memory_bytes == 12.0
    assert list(own.kinds.items()) == [("y", (1, 2)), ("x", (0,))]


def test_measurements_under_other_conditions_do_not_mix(tmp_path):
    two, three = (
        session.Ranks(about=tuple(answer("a", "cpu", 1.0, shares=True) for _ in range(count)))
        for count in (2, 3)
    )
    session.Session.open(tmp_path, two, device_type="cpu")
    session.Session.open(tmp_path, two, device_type="cpu")
    with pytest.raises(ProfileError, match="with nproc 2, but here it is 3"):
        session.Session.open(tmp_path, three, device_type="cpu")


# Timing, with a clock that is told the time


class Scripted(Clock):
    """A clock whose readings are a second for each call of `tick` inside the work."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.ticks = 0

    def time(self, work, *, head_start_s=0.0):
        before = self.ticks
        result = work()
        return float(self.ticks - before), result


def test_each_sample_of_a_collective_is_a_mean(monkeypatch):
    """Work of a second, for 20 seconds: 10 samples of two calls each, a second a call."""
    clock = Scripted()

    def tick() -> None:
        clock.ticks += 1

    timing = "profiles.measure.timing.collective_timing"
    monkeypatch.setattr(f"{timing}._collective", lambda *args: tick)
    monkeypatch.setattr(f"{timing}._agreed", lambda seconds, *args: seconds)
    timed = time_collective("all_reduce", 8, None, clock=clock, seconds=20)
    assert timed == {"seconds": [1.0] * 10}
    assert clock.ticks == 1 + 20


@pytest.mark.parametrize(
    ("ends", "slowed"),
    [
        ((2.0, 2.0), (2.0, 2.0)),  # each alone takes 1 s, together both take 2
        ((1.0, 1.0), (1.0, 1.0)),  # neither slows the other
        ((1.5, 2.0), (1.5, 3.0)),  # when compute ends at 1.5 s, half of the message is left
    ],
)
def test_slowdown_is_of_the_time_both_ran(monkeypatch, ends, slowed):
    timing = "profiles.measure.timing.overlap_timing"
    monkeypatch.setattr(f"{timing}.dist.barrier", lambda: None)
    monkeypatch.setattr(f"{timing}._together_on_cpu", lambda *args: ends)
    found = _slowed(Clock(CPU), None, 1, None, 1.0, 1.0)
    assert found == pytest.approx(slowed)


def test_work_of_a_step_is_what_its_name_says():
    """A cast writes bfloat16 weights; sums take gradients at every call."""
    cast = _WORK["cast"](2, 16, CPU)()
    assert [weight.dtype for weight in cast] == [torch.bfloat16] * 2
    accumulate = _WORK["accumulate"](1, 4, CPU)
    accumulate()
    (total,) = accumulate()
    assert total.tolist() == [2.0] * 4
    assert total.dtype == torch.float32

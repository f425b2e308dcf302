"""Groups, links and stragglers from made-up clusters, and what launchers tell a process."""

import sys

import pytest

from profiles import Group
from profiles.lookup.topology import (
    PairRate,
    concrete_groups,
    describe_links,
    describe_slow_links,
    describe_slow_nodes,
    describe_stragglers,
    groups_to_measure,
    link_levels,
    nodes_of,
    pairs_to_measure,
)
from profiles.measure.driver import (
    ClockState,
    clock_state,
    gpu_links,
    links_by_library,
    parse_topology,
)
from profiles.records import NodeLinkRecord

TWO_NODES = ((0, 1, 2, 3), (4, 5, 6, 7))


def pair(a, b, gb_per_s):
    return PairRate(ranks=(a, b), latency_s=1e-5, bytes_per_s=gb_per_s * 1e9)


def test_ranks_are_sorted_into_nodes_by_host():
    assert nodes_of(["x", "x", "y", "y", "x"]) == ((0, 1, 4), (2, 3))


def test_groups_are_those_a_search_can_form():
    """Two nodes of four: 2 and 4 inside, 1, 2 and 4 of each across."""
    shapes = [str(group) for group in groups_to_measure(TWO_NODES)]
    assert shapes == ["2x1", "4x1", "1x2", "2x2", "4x2"]
    assert groups_to_measure(((0,),)) == ()


def test_all_groups_of_a_shape_run_at_once():
    """As in training: every tp group communicates when one does."""
    assert concrete_groups(Group(ranks_per_node=2), TWO_NODES) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    across = concrete_groups(Group(ranks_per_node=2, num_nodes=2), TWO_NODES)
    assert across == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_that_cannot_be_formed_is_refused():
    with pytest.raises(ValueError, match="8x1 can't be formed on 2 nodes of 4 ranks"):
        concrete_groups(Group(ranks_per_node=8), TWO_NODES)


def test_few_ranks_are_paired_fully_and_many_by_sample():
    assert len(pairs_to_measure(TWO_NODES)) == 28
    many = tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(4))
    sampled = pairs_to_measure(many)
    assert (0, 7) in sampled
    assert (0, 8) not in sampled  # of nodes, a rank of each is measured by itself
    assert len(sampled) == 28


def test_levels_end_where_the_rate_drops():
    pairs = [pair(0, 1, 300), pair(2, 3, 280), pair(0, 2, 24), pair(1, 3, 25)]
    assert [len(level) for level in link_levels(pairs)] == [2, 2]


def test_a_slow_link_is_named_among_its_like():
    hosts = ["a", "a", "b", "b", "c", "c"]
    pairs = [pair(0, 1, 300), pair(2, 3, 290), pair(4, 5, 100)]
    pairs += [pair(0, 2, 25), pair(0, 4, 25), pair(2, 4, 10)]
    slow = describe_slow_links(pairs, hosts)
    assert len(slow) == 2
    assert "rank 4 on c to rank 5 on c: 100 GB/s, others 290" in slow[0]
    assert "rank 2 on b to rank 4 on c: 10 GB/s, others 25" in slow[1]


def node_link(a, b, gb_per_s, latency_us=50):
    return NodeLinkRecord(nodes=(a, b), latency_s=latency_us * 1e-6, bytes_per_s=gb_per_s * 1e9)


@pytest.mark.parametrize(
    "slow", [{"gb_per_s": 0.4}, {"gb_per_s": 24, "latency_us": 900}], ids=["rate", "latency"]
)
def test_a_node_with_slow_links_is_named(slow):
    """Issue 19, 1: of three nodes two links of three are the slow node's."""
    links = [node_link("a", "b", **slow), node_link("a", "c", 25), node_link("b", "c", **slow)]
    (line,) = describe_slow_nodes(links)
    assert line.startswith("slow node: the links of b to all other nodes: ")
    links += [node_link("a", "d", 25), node_link("b", "d", 25), node_link("c", "d", 25)]
    told = describe_slow_nodes(links)
    assert [line.split(":")[:2] for line in told] == [
        ["slow link", " a to b"], ["slow link", " b to c"]
    ]  # fmt: skip


def test_links_alike_and_a_single_link_name_no_node():
    alike = [node_link("a", "b", 25), node_link("a", "c", 18), node_link("b", "c", 22, 200)]
    assert describe_slow_nodes(alike) == []
    assert describe_slow_nodes([node_link("a", "b", 0.1)]) == []
    assert describe_links([pair(0, 1, 25)], ["a", "b"]) == [
        "link level 0: 1 pairs (0 inside a node), 25 GB/s, 10 us"
    ]


def test_a_slow_node_is_named_once():
    seconds = {0: 1.0, 1: 1.0, 2: 1.4, 3: 1.5, 4: 1.0, 5: 1.0}
    assert describe_stragglers(seconds, ["a", "a", "b", "b", "c", "c"]) == [
        "slow node: the devices of b take 1.45 times the median"
    ]


def test_a_straggler_is_named():
    lines = describe_stragglers({0: 1.0, 1: 1.02, 2: 1.4, 3: 0.99}, ["a", "a", "b", "b"])
    assert len(lines) == 1
    assert "rank 2 on b" in lines[0]


def test_the_driver_report_is_read():
    report = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\n"
        "GPU0\t X \tNV18\tPXB\t0-47\n"
        "GPU1\tNV18\t X \tSYS\t0-47\n"
        "NIC0\tPXB\tSYS\t X \n"
    )
    assert parse_topology(report) == ["GPU0: NV18 to GPU1", "GPU1: NV18 to GPU0"]


class FakeLibrary:
    """pynvml of a node of three GPUs: 0 and 1 share 18 NVLinks, 2 hangs on another socket."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 36, 1
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if handle == 2 or link >= 18:
            raise self.NVMLError("not supported")
        return 1

    def nvmlDeviceGetP2PStatus(self, a, b, index):
        return 0 if {a, b} == {0, 1} else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 50

    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwThermalSlowdown = 4, 64

    def nvmlDeviceGetHandleByUUID(self, name):
        if name != "GPU-1234":
            raise self.NVMLError("not found")
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 4 | 64 | 1

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle):
        return 699_500


def test_the_driver_library_tells_what_holds_clocks_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeLibrary())
    assert clock_state("1234") == ClockState(
        sm_mhz=1410.0, most_sm_mhz=1980.0, power_w=699.5, throttled=("power", "heat")
    )
    assert clock_state("another") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clock_state("1234") is None


def test_the_driver_library_tells_nvlink_from_pcie():
    assert links_by_library(FakeLibrary()) == [
        "GPU0: 18 NVLinks; NVLink to GPU1, the link between sockets to GPU2",
        "GPU1: 18 NVLinks; NVLink to GPU0, the link between sockets to GPU2",
        "GPU2: the link between sockets to GPU0, the link between sockets to GPU1",
    ]


def test_a_missing_nvidia_smi_is_one_line(monkeypatch):
    """D, bad input: the measurement goes on with the links as measured."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    (line,) = gpu_links()
    assert "nvidia-smi is installed" in line
    assert "known only as measured" in line

"""Which meshes a search tries: rules of the table of axes, and what a request fixes."""

from __future__ import annotations

from dataclasses import replace

from planner.language.layout.axes import Degrees
from search import SearchRequest
from search.space.request_checks import divisors
from search.space.shapes import Space
from tests.search.machine import Machine
from tests.sharding.models import captured


def sizes_of(num_devices: int, *, per_node: int = 8, can_split=lambda size: True, **choices):
    sizes = Space(
        request=SearchRequest(num_devices=num_devices, global_batch=8, **choices),
        graph=captured("gpt"),
        cluster=Machine(devices_per_node=per_node).cluster,
        can_split=can_split,
    )
    return list(sizes.meshes()), sizes.reasons


def test_every_mesh_uses_all_devices_once():
    found, reasons = sizes_of(6)
    assert all(degrees.num_ranks * pp == 6 for degrees, pp in found)
    assert len(set(found)) == len(found) == 9  # 6 = tp * pp * dp in nine ways; cp stays 1
    assert reasons == {}


def test_the_rest_axis_gets_what_others_leave():
    found, _ = sizes_of(8, tp=2, pp=2)
    assert found == [(Degrees(dp=2, tp=2), 2)]


def test_tp_stays_in_a_node_unless_it_is_fixed():
    found, reasons = sizes_of(4, per_node=2, pp=1, rp=1)
    assert [degrees["tp"] for degrees, _ in found] == [1, 2]
    assert list(reasons) == ["tp stays in a node"]
    fixed, _ = sizes_of(4, per_node=2, tp=4)
    assert fixed == [(Degrees(tp=4), 1)]


def test_shards_are_copied_only_where_devices_span_nodes():
    """Inside a node the links of a larger group of shards are no slower."""
    assert all(degrees["rp"] == 1 for degrees, _ in sizes_of(4, pp=1, tp=1)[0])
    found, _ = sizes_of(4, per_node=2, pp=1, tp=1)
    assert [(degrees["rp"], degrees["dp"]) for degrees, _ in found] == [(1, 4), (2, 2), (4, 1)]
    assert sizes_of(4, rp=2, pp=1, tp=1)[0] == [(Degrees(rp=2, dp=2), 1)]


def test_what_no_op_can_be_split_in_is_left_out():
    found, reasons = sizes_of(4, pp=1, can_split=lambda size: size < 4)
    assert [degrees["tp"] for degrees, _ in found] == [1, 2]
    assert reasons == {"tp splits an op": "tp=4 divides no dimension of the model"}


def test_cp_is_tried_on_short_sequences_only_where_it_is_fixed():
    """Sixteen positions: four parts divide them, three do not."""
    assert all(degrees["cp"] == 1 for degrees, _ in sizes_of(4)[0])
    assert sizes_of(4, cp=4)[0] == [(Degrees(cp=4), 1)]
    found, reasons = sizes_of(3, cp=3)
    assert found == []
    assert list(reasons) == ["cp divides sequences"]


def test_divisors_ascend():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_zero_is_not_searched_where_a_block_trains_several_dtypes():
    """It would be refused when the run starts."""
    graph = captured("gpt")
    norm = next(i for i, t in enumerate(graph.tensors) if t.kind == "param" and len(t.shape) == 1)

    def zeros(dtype: str, **choices) -> tuple[set[int], dict[str, str]]:
        tensors = list(graph.tensors)
        tensors[norm] = replace(tensors[norm], dtype=dtype)
        space = Space(
            request=SearchRequest(num_devices=2, global_batch=8, **choices),
            graph=replace(graph, tensors=tuple(tensors)),
            cluster=Machine(devices_per_node=8).cluster,
            can_split=lambda size: True,
        )
        return {zero for shape in space.shapes() for zero in shape.zeros}, space.reasons

    assert zeros("float32")[0] == {0, 1, 3}
    found, reasons = zeros("float64")
    assert found == {0}
    assert reasons["zero takes one real dtype a block"].endswith("trains float32 and float64")
    # Of bf16 the copies that train are fp32.
    assert zeros("bfloat16", precision="bf16")[0] == {0, 1, 3}

"""Pictures: which devices hold which blocks, and which links join them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commands.render.html.pictures import MOST_INSIDE, model_picture, network_picture
from search.report.network import LinkView, NetworkView
from search.report.report_numbers import BlockView, HeldParameter, ReportNumbers
from tests.cli.render.views import overview, stage_view
from tests.plan.test_diff import plan_of

NETWORK = NetworkView(
    name="hall", device="test device", num_devices=64, devices_per_node=8,
    links=(
        LinkView(name="inside", reaches=8, bytes_per_s=4.5e11, latency_s=2e-6, axes=("tp", "dp")),
        LinkView(name="rail", reaches=16, bytes_per_s=4e8, latency_s=1e-5, axes=()),
        LinkView(name="spine", reaches=64, bytes_per_s=float("inf"), latency_s=3e-5, axes=("pp",)),
    ),
)  # fmt: skip


def test_a_network_is_boxes_from_the_outermost_in():
    """64 devices: 4 groups of 16, of 2 nodes each, of 8 devices each."""
    picture = network_picture(NETWORK)
    assert [(level["link"], level["count"]) for level in picture["levels"]] == [
        ("spine", 4), ("rail", 2), ("inside", 8)
    ]  # fmt: skip
    assert [level["rate"] for level in picture["levels"]] == ["free", "400 MB/s", "450 GB/s"]
    assert picture["levels"][2]["latency"] == "2 us"
    assert picture["summary"] == (
        "64 x test device, 8 to a node. Tp and dp over inside (450 GB/s); pp over spine (free)."
    )
    assert picture["table"].rows[1] == ("rail", "16 devices", "400 MB/s", "10 us",
                                        "nothing of this plan")  # fmt: skip


def test_what_is_not_drawn_of_a_network_is_counted():
    wide = replace(NETWORK, links=(NETWORK.links[0], replace(NETWORK.links[2], reaches=100)))
    outer, inner = network_picture(wide)["levels"]
    assert (outer["count"], outer["shown"], outer["more"]) == (13, MOST_INSIDE, 9)
    assert (inner["count"], inner["shown"], inner["more"]) == (8, 8, 0)


def block(index: int, block_class: int, *placements: tuple[str, str]) -> BlockView:
    weight = HeldParameter(name="weight", shape=(8, 4), placements=placements)
    return BlockView(
        index=index, name=f"model.layers.{index}", block_class=block_class, recompute="full",
        params=(weight,),
    )  # fmt: skip


def numbers(**changes: Any) -> ReportNumbers:
    """Two pp ranks of a tp and a dp of 2, whose blocks are of two classes."""
    plan = plan_of("tp2 dp2").model_copy(update={"pp": 2})
    stages = tuple(
        plan.stages[0].model_copy(update={"stage_index": index, "pp_rank": index})
        for index in range(2)
    )
    views = tuple(
        stage_view(index, first_rank=4 * index, last_rank=4 * index + 3) for index in range(2)
    )
    parts: dict[str, Any] = {
        "plan": plan.model_copy(update={"stages": stages}),
        "overview": overview(num_devices=8, stages=views),
        "predicted": (), "measured": (), "memory": (), "roofline": (), "certificate": {},
        "blocks": (
            (block(0, 7), block(1, 9, ("tp", "S(0)"))), (block(2, 9, ("tp", "S(1)")), block(3, 7)),
        ),
        "memory_bytes_per_s": 1e12, "peak_flop_per_s": {}, "networks": (NETWORK,),
        "runners_up": (), "front": (),
    }  # fmt: skip
    return ReportNumbers(**(parts | changes))


def test_each_pipeline_rank_has_its_devices_and_its_blocks():
    first, second = model_picture(numbers())["rows"]
    assert (first["name"], first["devices"]) == ("pipeline rank 0", "ranks 0 to 3")
    assert first["mesh"] == "tp 2"
    assert not first["is_slowest"]
    assert second["is_slowest"]  # works 9 s of 10, rank 0 6
    assert [box["label"] for box in second["stages"][0]["blocks"]] == ["2", "3"]
    shades = [box["shade"] for row in (first, second) for box in row["stages"][0]["blocks"]]
    assert shades == [0, 1, 1, 0]  # alike are alike
    assert (first["more_cells"], first["columns"]) == (0, 2)


def test_a_device_is_told_by_its_place_in_the_mesh():
    """Neighbours are of one tp group: dp is outside of it."""
    first, _ = model_picture(numbers())["rows"]
    assert first["cells"] == [
        "rank 0, node 0: dp 0, tp 0", "rank 1, node 0: dp 0, tp 1",
        "rank 2, node 0: dp 1, tp 0", "rank 3, node 0: dp 1, tp 1",
    ]  # fmt: skip
    small = (replace(NETWORK, devices_per_node=2),)
    cells = model_picture(numbers(networks=small))["rows"][1]["cells"]
    assert cells[-1] == "rank 7, node 3: dp 1, tp 1"


def test_a_block_tells_how_its_parameters_lie():
    picture = model_picture(numbers())
    first, second = picture["rows"][0]["stages"][0]["blocks"]
    whole, split = picture["details"][first["detail"]], picture["details"][second["detail"]]
    assert "weight (8 x 4): whole on each device" in whole
    assert "weight (8 x 4): dim 0 split over tp" in split
    assert "model.layers.1: block 1, stage 0, ranks 0 to 3" in split
    assert "recomputes: full" in split


def test_the_text_of_the_model_counts_what_is_split():
    picture = model_picture(numbers())
    assert picture["summary"] == (
        "4 blocks in 2 stages on 2 pipeline ranks of 4 devices. "
        "Parameters of 2 blocks are split inside a stage."
    )
    assert picture["table"].rows[1] == (
        "1", "1", "ranks 4 to 7", "layers.2..3", "1.5 M", "none", "1 ms", "2 ms", "60.0%"
    )  # fmt: skip
    unsplit = model_picture(numbers(blocks=((block(0, 7),), (block(1, 7),))))
    assert unsplit["summary"].endswith("holds its blocks whole when it computes.")


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"last_rank": 0}, "rank 0"), ({"device_group": "old"}, "ranks 0 to 1 on old")],
)
def test_devices_of_a_stage_are_told_by_rank_and_group(changes, told):
    views = (stage_view(0, **changes), stage_view(1))
    found = model_picture(numbers(overview=overview(stages=views)))
    assert found["rows"][0]["devices"] == told
    assert found["table"].rows[0][2] == told

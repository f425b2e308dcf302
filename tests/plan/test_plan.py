"""What a plan derives from its decisions, and which decisions do not hold together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.language.plan.parts import ClusterRef, ModelRef, StagePlan
from planner.language.plan.plan import Plan
from planner.language.plan.replication import Replication


def plan(**changes) -> Plan:
    fields = {
        "model": ModelRef(
            name="m", file="m.py", fingerprint="0" * 64, inputs=(), batch_tree={"tuple": []}
        ),
        "cluster": ClusterRef(name="c", device="cpu", devices_per_node=1),
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "vpp": 1,
        "microbatch_size": 3,
        "num_microbatches": 4,
        "schedule": "1f1b",
        "zero_stage": 1,
        "stages": stages(),
        "layouts": (),
    }
    return Plan(**(fields | changes))


def stages(*own: tuple) -> tuple[StagePlan, ...]:
    own = own or ((), ())
    return tuple(
        StagePlan(pp_rank=i, first_block=i, last_block=i, own_sizes=sizes)
        for i, sizes in enumerate(own)
    )


def test_sizes_follow_from_degrees():
    found = plan()
    assert (found.world_size, found.microbatch_samples, found.global_batch) == (8, 6, 24)
    mesh = found.mesh(1)
    assert mesh.ranks == (4, 5, 6, 7)
    assert (mesh.size("dp"), mesh.size("tp")) == (2, 2)
    assert found.layout(0, axis="tp", degrees=found.degrees) is None


def test_a_stage_with_a_tp_of_its_own_has_more_replicas_of_fewer_samples():
    found = plan(stages=stages((), (("tp", 1),)), microbatch_size=2)
    assert found.stage_degrees(1)["dp"] == 4
    assert (found.stage_microbatch_size(0), found.stage_microbatch_size(1)) == (2, 1)
    assert found.mesh(1).size("dp") == 4
    shared = [Replication.of(found, stage) for stage in (0, 1)]
    assert [each.shards for each in shared] == [2, 4]
    alone = Replication(replicas=1, zero_stage=3)
    assert not alone.is_sharded  # nothing to shard over


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": stages()[:1]}, "1 stages given; pp\\*vpp=2 needed"),
        ({"stages": stages()[::-1]}, "stages must cover every block once, in order"),
        ({"stages": (stages()[0], StagePlan(pp_rank=2, first_block=1, last_block=1))}, "pp rank 2"),
        (
            {"stages": tuple(s.model_copy(update={"pp_rank": 1}) for s in stages())},
            "pp rank 0 holds 0 stages; each holds vpp=1",
        ),
        ({"stages": stages((), (("tp", 1),))}, "which does not divide them"),
        ({"dp": 2**20}, "it has 4194304 ranks"),
        ({"ep": 3}, r"ep=3 \* etp=1 does not divide the \d+ ranks of a stage"),
        ({"etp": 3}, "etp=3 was given and tp="),
        ({"estimate": {"step_s": 1.0}}, "estimate"),
    ],
)
def test_decisions_that_do_not_hold_together(changes, says):
    with pytest.raises(ValidationError, match=says):
        plan(**changes)


def test_stages_of_a_pp_rank_share_its_mesh():
    both = tuple(
        StagePlan(pp_rank=0, first_block=i, last_block=i, own_sizes=own)
        for i, own in enumerate(((), (("tp", 1),)))
    )
    with pytest.raises(ValidationError, match="stages of one pp rank share its mesh"):
        plan(pp=1, vpp=2, stages=both, microbatch_size=2)

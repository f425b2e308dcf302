"""V12, X11: torchtitan's configuration; PyTorch's own loader reads the schedule back."""

import tomllib

import pytest

from planner.emit import emit, find_emitter, refusals
from planner.language.schedule import build_schedule
from planner.language.schedule.registry import SCHEDULES
from tests.emit.readers import (
    CURRENT,
    TRAINING,
    V02,
    assert_documented,
    load_torchtitan,
    loaded_by_torch,
)
from tests.emit.views import assert_golden, attending, changed, view_of

TITAN, TOML = find_emitter("torchtitan"), find_emitter("torchtitan-toml")

SMALL = {"pp": 2, "gpus": 8, "global_batch": 8, "layers": 6}


def test_golden_files():
    assert_golden(emit(view_of(**SMALL, zero_stage=3), TITAN).files, "torchtitan")
    assert_golden(emit(view_of(**SMALL, zero_stage=2), TOML).files, "torchtitan-toml")


def test_the_configuration_has_documented_fields(tmp_path, monkeypatch):
    view = view_of(**SMALL, zero_stage=3, recompute="full")
    config = load_torchtitan(emit(view, TITAN).files, tmp_path, monkeypatch)
    assert_documented(vars(config.parallelism), CURRENT)
    assert_documented(vars(config.training), TRAINING)
    assert config.activation_checkpoint == "full"
    assert config.training.num_tokens_per_train_step == view.plan.global_batch * 8192
    names = [name for part in config.parallelism.module_fqns_per_model_part for name in part]
    layers = [f"layers.{i}" for i in range(6)]
    assert names == ["tok_embeddings", *layers, "norm", "lm_head"]
    assert config.parallelism.pipeline_parallel_schedule_csv == str(tmp_path / "schedule.csv")


def test_an_older_toml_passes_keys_and_values_of_a_ring_on():
    """B10: what torchtitan calls alltoall is a ring; its present form has no such field."""
    view = attending(
        view_of(**SMALL | {"dp": "", "zero_stage": 3, "cp": 2, "gpus": 16}), "S(2),S(2),S(2)"
    )
    config = tomllib.loads(emit(view, TOML).files["torchtitan.toml"])
    assert config["parallelism"]["context_parallel_rotate_method"] == "alltoall"
    assert [r.feature for r in refusals(view, TITAN)] == ["cp"]


@pytest.mark.parametrize("cells", [{}, {"pp": 1, "vpp": 1}, {"cp": 2, "gpus": 16}], ids=str)
def test_toml_has_documented_fields(cells):
    view = view_of(**SMALL | {"dp": "", "zero_stage": 3} | cells)
    sections = tomllib.loads(emit(view, TOML).files["torchtitan.toml"])
    assert V02.keys() > sections.keys() == {"parallelism", "training", "activation_checkpoint"}
    for section, values in sections.items():
        assert_documented(values, V02[section])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_pytorch_loads_every_schedule_with_the_same_jobs_in_the_same_order(name, tmp_path):
    vpp = max(SCHEDULES[name].min_vpp, 1)
    table = build_schedule(name, pp=4, vpp=vpp, num_microbatches=8)
    from planner.emit.targets.torchtitan import schedule_csv

    path = tmp_path / "schedule.csv"
    path.write_text(schedule_csv(table))
    runtime = loaded_by_torch(path, pp=4, num_stages=4 * vpp, num_microbatches=8)
    for rank, row in enumerate(table.jobs):
        assert [str(action) for action in runtime.pipeline_order[rank]] == list(map(str, row))
        computed = [a for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert list(map(str, computed)) == list(map(str, row))
    homes = runtime.stage_index_to_group_rank
    assert tuple(homes[s] for s in range(4 * vpp)) == table.stage_to_pp_rank


def test_a_v_is_kept_and_other_folds_are_refused():
    view = view_of(**SMALL | {"vpp": 1, "schedule": "ZB-V", "zero_stage": 0})
    assert "'ZBVZeroBubble'" in emit(view, TITAN).files["planned.py"]
    turned = tuple(
        stage.model_copy(update={"pp_rank": 1 - stage.pp_rank}) for stage in view.plan.stages
    )
    found = {refusal.feature for refusal in refusals(changed(view, stages=turned), TITAN)}
    assert found == {"stage-placement"}


@pytest.mark.parametrize("zero", [0, 2])
def test_copies_of_shards_are_its_replicas(zero):
    view = view_of(zero_stage=zero)
    degrees = view.plan.degrees
    copied = changed(view, degrees=degrees.with_sizes(rp=2, dp=degrees["dp"] // 2))
    text = next(iter(emit(copied, TITAN).files.values()))
    shards = degrees["dp"] // 2 if zero else 1
    assert f"data_parallel_replicate_degree={degrees['dp'] // shards}" in text
    assert f"data_parallel_shard_degree={shards}" in text


def test_what_it_can_not_express_is_refused_by_name():
    view = view_of(**SMALL, zero_stage=1)
    host = changed(view, optimizer_on_host=True)
    assert {r.feature for r in refusals(host, TITAN)} == {"zero", "optimizer-on-host"}
    replicated = view_of(**SMALL, zero_stage=0, sp=0)
    assert not refusals(replicated, TITAN)
    assert {r.feature for r in refusals(replicated, TOML)} == {"tp", "pp", "layouts"}


def test_whole_experts_on_tp_are_refused():
    """Without ep it cuts their matrices on tp (`apply_moe_ep_tp`)."""
    cells = {"model": "mixtral-8x7b", "ep": 1, "tp": 2, "zero_stage": 0, "vpp": 1, "pp": 1}
    for emitter in (TITAN, TOML):
        whole, cut = (
            [
                r
                for r in refusals(view_of(**cells, etp=etp, dp=8), emitter)
                if r.feature == "layouts"
            ]
            for etp in (1, 2)
        )
        assert "cuts the matrices of all experts on tp" in whole[0].why
        assert not cut

"""The GPU benchmark: the whole way on a CPU, on made-up numbers where they decide nothing."""

import subprocess
import sys
from typing import get_args

import pytest
import torch

from benchmarks.gpu.kept import keep, read_kept, with_measured, write_kept
from benchmarks.gpu.measure import comparison, errors_by_family, measure
from planner.errors import ProfileError
from profiles import load_profile
from profiles.lookup.fit import fit_ops
from profiles.measure import measure as measuring
from profiles.measure import rounds
from profiles.records import HostWork
from tests.profiles.fake_workers import FakeWorkers
from tests.profiles.probes import a_few_probes
from tests.profiles.samples import figure, file, linear_record, op_fit, profile


def test_the_shipped_profile_is_judged_by_family():
    """Shipped: 1e11 flop/s. Measured: half of that, so the shipped times are 50% short."""
    records = [linear_record(m, 256, 256, rate=5e10) for m in (64, 128, 256)]
    measured = profile(records, op_fits=fit_ops(records))
    shipped = profile(op_fits=[op_fit("matmul", s_per_flop=1e-11)])
    errors = errors_by_family(shipped, measured)
    assert errors == {("matmul", "float32", "forward"): pytest.approx([-0.5] * 3)}
    assert comparison(shipped, measured).row_count == 1


def test_what_is_kept_survives_the_disk_and_replaces_what_was_fitted(tmp_path):
    records = [linear_record(m, 256, 256) for m in (64, 128, 256)]
    kept = keep(
        profile(
            records,
            op_fits=fit_ops(records),
            context_bytes=figure(5e8),
            block_correction={"forward": figure(0.9)},
        )
    )
    write_kept("test", kept, tmp_path)
    assert read_kept("test", tmp_path) == kept
    assert read_kept("another", tmp_path) is None
    fitted = op_fit("matmul", s_per_flop=1.0), op_fit("attention", s_per_flop=1.0)
    made = with_measured(file(op_fits=fitted, source="shipped"), kept)
    by_family = {fit.family: fit for fit in made.op_fits}
    assert by_family["attention"] == fitted[1]
    assert 1 / by_family["matmul"].s_per_flop == pytest.approx(1e11, rel=0.05)
    assert by_family["matmul"].origin == "measured"
    assert "measured on test device, 2026-01-01, torch 2.13" in by_family["matmul"].detail
    assert made.context_bytes.value == 5e8
    assert made.block_correction["forward"].value == 0.9
    assert made.collective_fits == ()
    assert made.cluster == file().cluster


def test_a_damaged_kept_file_is_named(tmp_path):
    (tmp_path / "test.json").write_text("{")
    with pytest.raises(ProfileError, match=r"test.json is damaged .* measure again with --keep"):
        read_kept("test", tmp_path)


@pytest.mark.slow
def test_the_whole_way_asks_for_all_that_a_gpu_can_tell(tmp_path, monkeypatch):
    """Grid, whole layers eager and compiled, every work of a step, launch, memory: on a fake."""
    asked = []

    class Workers(FakeWorkers):
        def call(self, task, *, timeout_s):
            asked.append(task)
            return super().call(task, timeout_s=timeout_s)

    monkeypatch.setattr(measuring, "WorkerGroup", Workers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(measuring, "standard_grid", a_few_probes)
    monkeypatch.setattr(rounds, "PASSES", 1)
    measured = measure(tmp_path, None, command="as asked")
    assert measured.file.notes[-1] == "measured by as asked"
    kept = keep(measured)
    assert set(kept.host_work) == set(get_args(HostWork))
    assert kept.typical_slowdown["product"].value == pytest.approx(1.1)
    works = {task["work"] for task in asked if task["task"] == "step"}
    assert works == {
        *("adamw", "sharded_adamw", "cast", "accumulate"),
        *("host_to_device", "device_to_host"),
    }
    assert {fit.work for fit in kept.step_fits} == works
    assert {task["task"] for task in asked} >= {"launch", "memory", "overlap", "collective"}
    blocks = [task["probe"] for task in asked if "program" in task.get("probe", ())]
    assert {probe["compiled"] for probe in blocks} == {False, True}
    assert "bfloat16" in {tensor["dtype"] for probe in blocks for tensor in probe["tensors"]}
    assert set(kept.block_correction) == {"forward", "backward"}
    assert {fit.dtype for fit in kept.op_fits} >= {"bfloat16", "float32"}
    assert kept.launch_overhead_s.value == pytest.approx(5e-6)


@pytest.mark.slow
def test_a_dry_run_on_a_cpu_goes_the_whole_way_without_a_solver(tmp_path):
    """As on a GPU machine: no OR-tools there, real workers, real blocks, really compiled."""
    script = (
        "import sys; sys.modules['ortools'] = None\n"
        "from benchmarks.gpu import measure\n"
        f"sys.argv = ['measure', '--device', 'cpu', '--budget', '60', '--out', {str(tmp_path)!r}]\n"
        "measure.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stands alone" in done.stdout
    kept = keep(load_profile(tmp_path))
    assert set(kept.compiled_block_correction) == {"forward", "backward"}
    assert {fit.work for fit in kept.step_fits} >= {"adamw", "cast", "accumulate"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured(tmp_path):
    measured = measure(tmp_path / "p", 120.0)
    assert measured.cluster.device_type == "cuda"
    assert measured.file.skipped == ()
    bfloat16 = dict(measured.cluster.peak_flop_per_s)["bfloat16"]
    assert bfloat16 > 1e13
    loaded = load_profile(tmp_path / "p")
    assert {r.dtype for r in loaded.ops} >= {"bfloat16", "float16", "float32"}

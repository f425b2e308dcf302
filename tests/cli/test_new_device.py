"""A device is added by its data file, and by nothing else."""

import json
import shutil

import pytest

from costmodel.table.rows.devices import device_of, is_scaled
from costmodel.table.rows.rows import estimate_rows
from planner.errors import ProfileError
from profiles import devices, load_profile, shipped_names

ROW = {
    "stack": "megatron-core", "gpus": "8", "layers": "24", "hidden": "2048", "heads": "16",
    "ffn_hidden": "8192", "gated_ffn": "0", "vocab": "50257", "seq_len": "1024",
    "global_batch": "32", "micro_batch": "2", "tp": "2", "pp": "2", "dp": "2", "dtype": "bf16",
}  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A copy of the shipped data, to which a test adds files."""
    shutil.copytree(devices.DATA, tmp_path / "data")
    monkeypatch.setattr(devices, "DATA", tmp_path / "data")
    return tmp_path / "data"


def write_toy(data) -> None:
    """A device of half the H100's memory that the same nodes hold."""
    toy = json.loads((data / "devices" / "h100-sxm5-80gb.json").read_text())
    toy |= {"name": "Toy X1", "pattern": "TOYX1", "reference": "toy-x1"}
    toy["shipped"] |= {"device": "Toy Corp X1", "driver_pattern": "Toy Corp X1"}
    toy["shipped"]["memory_bytes"]["value"] /= 2
    (data / "devices" / "toy-x1.json").write_text(json.dumps(toy))


def test_a_new_device_can_be_searched_for(data, planner, write_model):
    write_toy(data)
    assert "toy-x1" in shipped_names()
    whole = load_profile("h100-sxm5-80gb").memory_bytes
    assert load_profile("toy-x1").memory_bytes == whole / 2
    assert load_profile("toy-x1").host == load_profile("h100-sxm5-80gb").host
    assert devices.shipped_for_gpu("Toy Corp X1 40GB") == "toy-x1"
    found = planner("search", write_model(), "--profile", "toy-x1", "--gpus", 2, "--no-cache")
    assert found.code == 0, found.stderr
    assert "Best plan: " in found.stdout


def test_a_data_sheet_is_priced_as_its_reference_device_scaled(data):
    sheet = {
        "format": "planner-device", "name": "Toy Y2", "pattern": "TOYY2",
        "reference": "h100-sxm5-80gb", "tflop_per_s": 500, "memory_gb": 64, "source": "none",
    }  # fmt: skip
    (data / "devices" / "toy-y2.json").write_text(json.dumps(sheet))
    assert is_scaled(device_of("toy-y2"))
    half, whole = estimate_rows([ROW | {"gpu": gpu} for gpu in ("Toy Y2", "H100")])
    assert half["reason"] == whole["reason"] == ""
    assert half["predicted_step_time_s"] > whole["predicted_step_time_s"]
    assert "rates=h100-sxm5-80gb scaled to Toy Y2" in half["assumed"]
    with pytest.raises(ProfileError, match="no profile 'toy-y2'"):
        load_profile("toy-y2")


def test_a_damaged_file_is_named(data):
    (data / "devices" / "toy-x1.json").write_text('{"format": "planner-device", "name": 3}')
    with pytest.raises(ProfileError, match=r"toy-x1\.json is damaged .*restore it"):
        devices.device_file("toy-x1")


def test_every_file_is_whole():
    """Each names a reference and a cluster that exist; no two mean the same names."""
    patterns = set()
    for name in devices.device_names():
        device = devices.device_file(name)
        assert devices.device_file(device.reference).shipped is not None, name
        assert (device.shipped is None) == (device.reference != name), name
        assert device.pattern not in patterns
        patterns.add(device.pattern)
        if device.shipped:
            devices.cluster_file(device.shipped.cluster)
            assert device.shipped.training or device.shipped.training_of


def test_a_file_that_is_saved_is_what_was_loaded(data):
    before = devices.device_file("b200-sxm")
    devices.save_device("b200-sxm", before)
    assert devices.device_file("b200-sxm") == before
    cluster = devices.cluster_file("dgx-b200")
    devices.save_cluster("dgx-b200", cluster)
    assert devices.cluster_file("dgx-b200") == cluster

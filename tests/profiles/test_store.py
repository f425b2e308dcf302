"""Profile directories: what is written is read back, and damage is named in one line."""

import json

import pandas as pd
import pytest

from planner.errors import ProfileError
from profiles import check_profile, load_profile, shipped_names
from profiles.records import SCHEMA_VERSION
from profiles.store import (
    check_writable,
    write_collectives,
    write_ops,
    write_profile_file,
    write_session,
)
from tests.profiles.samples import collective_record, file, linear_record


@pytest.fixture
def directory(tmp_path):
    write_profile_file(tmp_path, file())
    write_ops(tmp_path, [linear_record(8, 4, 2), linear_record(16, 4, 2)])
    write_collectives(tmp_path, [collective_record("all_reduce", 1024, 1e-5)])
    return tmp_path


def complaint(directory):
    with pytest.raises(ProfileError) as caught:
        load_profile(directory)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_profile_survives_the_disk(directory):
    loaded = load_profile(directory)
    assert loaded.file == file()
    assert loaded.ops == (linear_record(8, 4, 2), linear_record(16, 4, 2))
    assert loaded.collectives == (collective_record("all_reduce", 1024, 1e-5),)


def test_records_are_readable_by_pandas(directory):
    table = pd.read_csv(directory / "ops.csv")
    assert list(table.seconds) == [r.seconds for r in load_profile(directory).ops]
    assert set(table.torch.astype(str)) == {"2.13"}
    assert json.loads(table.shapes[0]) == [[8, 2], [4, 2]]


@pytest.mark.parametrize("name", ["profile.json", "ops.csv", "collectives.csv"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    assert name in complaint(directory)


def test_garbage_is_named(directory):
    (directory / "profile.json").write_bytes(b"\x00\xffnot json")
    assert "profile.json" in complaint(directory)


def test_an_old_schema_says_both_versions(directory):
    path = directory / "profile.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    assert "version 1" in complaint(directory)
    assert f"version {SCHEMA_VERSION}" in complaint(directory)


def test_a_field_of_the_wrong_kind_is_named(directory):
    path = directory / "profile.json"
    data = json.loads(path.read_text())
    data["cluster"]["devices_per_node"] = -1
    path.write_text(json.dumps(data))
    assert "cluster.devices_per_node" in complaint(directory)


def test_a_half_written_line_is_named(directory):
    path = directory / "ops.csv"
    path.write_text(path.read_text()[:-40])
    assert "ops.csv line 3" in complaint(directory)


@pytest.mark.parametrize("seconds", ["-1", "nan", "fast"])
def test_a_time_that_is_none_is_named(directory, seconds):
    path = directory / "collectives.csv"
    path.write_text(path.read_text().replace("1e-05", seconds))
    assert "collectives.csv line 2" in complaint(directory)
    assert "seconds" in complaint(directory)


def test_a_stopped_measurement_says_how_to_go_on(tmp_path):
    write_session(tmp_path, {"device": "test"})
    assert "resume" in complaint(tmp_path)


def test_unknown_names_list_the_known():
    with pytest.raises(ProfileError, match="did you mean h100-sxm5-80gb"):
        load_profile("h100-smx5")
    with pytest.raises(ProfileError, match="no profile directory"):
        load_profile("./nowhere")


def test_a_file_is_not_a_profile(directory):
    with pytest.raises(ProfileError, match="is a file"):
        load_profile(directory / "ops.csv")


def test_check_is_silent_about_a_good_profile_and_says_what_is_wrong(directory):
    assert check_profile(directory) == []
    write_ops(directory, [linear_record(8, 4, 2, spread=9.0, repeats=5)])
    write_profile_file(directory, file(complete=False))
    problems = check_profile(directory)
    assert any("busy" in problem for problem in problems)
    assert any("budget" in problem for problem in problems)
    (directory / "ops.csv").unlink()
    assert any("ops.csv" in problem for problem in check_profile(directory))


def test_shipped_profiles_are_whole():
    assert {"a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm"} <= set(
        shipped_names()
    )
    for name in shipped_names():
        assert check_profile(name) == []


def test_a_file_is_no_place_for_a_profile(tmp_path):
    (tmp_path / "p").write_text("mine")
    with pytest.raises(ProfileError, match="is a file; profiles are directories"):
        check_writable(tmp_path / "p")
    assert (tmp_path / "p").read_text() == "mine"

"""Files kept between runs: where they are, and that a reader finds a whole one or none."""

import sys

import pytest

from planner.cache_folder import cache_dir, write_entry


@pytest.mark.skipif(sys.platform != "linux", reason="each system has its own folder")
def test_the_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "planner"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "planner"


def test_an_entry_replaces_another_and_leaves_nothing_else(tmp_path):
    entry = tmp_path / "new" / "entry.json"
    write_entry(entry, "first")
    write_entry(entry, "second")
    assert entry.read_text() == "second"
    assert list(entry.parent.iterdir()) == [entry]


def test_what_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    write_entry(tmp_path / "file" / "entry.json", "text")
    assert (tmp_path / "file").read_text() == "in the way"
    folder = tmp_path / "entry.json"
    folder.mkdir()
    write_entry(folder, "text")
    assert not list(tmp_path.glob("*.tmp"))

"""Records of runtimes: complete, with a source for each constant, and one line for a wrong name."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from costmodel.execution import Execution, execution_names, find_execution
from costmodel.execution import execution as records
from planner.errors import PlannerError


@pytest.mark.parametrize("name", execution_names())
def test_every_constant_has_a_source(name: str) -> None:
    execution = find_execution(name)
    assert execution.name == name == records.read_record(name)["name"]
    sources = records.sources_of(name)
    assert set(sources) == {field.name for field in fields(Execution)} - {"name"}
    assert all(len(source) > 10 for source in sources.values())


def test_a_record_changes_what_it_extends() -> None:
    classic, zero3 = find_execution("megatron-classic"), find_execution("deepspeed-zero3")
    assert (classic.zero_stage, zero3.zero_stage) == (0, 3)
    assert zero3.optimizer_pass_bytes == classic.optimizer_pass_bytes


def test_an_unknown_name_is_one_line() -> None:
    with pytest.raises(PlannerError, match="did you mean 'megatron-core'"):
        find_execution("megatron-cor")


def test_a_record_that_lacks_a_constant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"value": 1, "source": "none"}
    text = json.dumps({"name": "toy", "values": {"zero_stage": entry, "colour": entry}})
    (tmp_path / "toy.json").write_text(text)
    monkeypatch.setattr(records, "DATA", tmp_path)
    with pytest.raises(PlannerError, match=r"toy\.json lacks prices"):
        find_execution("toy")

"""Modules of a user that are called like ours are theirs in their code, and ours elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cli
import profiles
import search
from planner.capture.source.model_file import load_model_file, local_modules
from planner.users_modules import OUR_NAMES, names_of, users_modules

MODEL = """
import cli, commands.layers, profiles, search
from torch import nn

WIDTH = search.WIDTH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = commands.layers.linear(WIDTH)

    def forward(self, x):
        from search import scale  # when it runs

        return scale(self.layer(x)).square().mean()


def model():
    import costmodel

    assert costmodel.MINE
    return Net()


def batch(size):
    import torch

    return (torch.zeros(size, WIDTH),)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's project with modules and packages of all our names."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cli.py").write_text("raise_nothing = 1\n")
    (tmp_path / "search.py").write_text("WIDTH = 8\n\n\ndef scale(x):\n    return 3 * x\n")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "me.py").write_text("")
    (tmp_path / "costmodel").mkdir()
    (tmp_path / "costmodel" / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "__init__.py").write_text("")
    (tmp_path / "commands" / "layers.py").write_text(
        "from torch import nn\n\n\ndef linear(width):\n    return nn.Linear(width, width)\n"
    )
    return tmp_path


def test_each_name_is_whose_code_runs(folder):
    ours = {name: sys.modules[name] for name in ("cli", "profiles", "search")}
    source = load_model_file(folder / "model.py")
    assert {name: sys.modules[name] for name in ours} == ours
    assert source.build().layer.in_features == 8
    assert {name: sys.modules[name] for name in ours} == ours
    with users_modules(folder):
        import search as theirs

        assert theirs.WIDTH == 8
        with users_modules(folder):
            assert sys.modules["search"] is theirs
        assert sys.modules["search"] is theirs
    assert sys.modules["search"] is search
    assert (cli, profiles) == (ours["cli"], ours["profiles"])


def test_a_capture_depends_on_their_files(folder):
    load_model_file(folder / "model.py")
    assert {folder / "search.py", folder / "commands" / "layers.py"} <= local_modules()


def test_a_folder_of_data_is_no_module(tmp_path):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "ops.csv").write_text("")
    assert names_of(tmp_path) == ()
    assert names_of(Path(cli.__file__).parent) == ()


def test_ours_come_back_after_an_error(folder):
    (folder / "model.py").write_text("import search\nraise ValueError(search.WIDTH)\n")
    with pytest.raises(Exception, match=r"line 2: ValueError: 8"):
        load_model_file(folder / "model.py")
    assert sys.modules["search"] is search


def test_a_process_without_ours_keeps_theirs(folder):
    """A rank loads none of our names but planner: lazy imports of a step find the user's."""
    code = (
        "import sys\n"
        "from planner.capture.source.model_file import load_model_file\n"
        f"source = load_model_file({str(folder / 'model.py')!r})\n"
        "net = source.build()\n"
        "net(source.batch(2)[0]).backward()\n"
        "assert sys.modules['search'].WIDTH == 8\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_every_room_and_the_command_are_named():
    tree = Path(cli.__file__).parent
    rooms = {file.parent.name for file in tree.glob("*/__init__.py")}
    rooms -= {"tests", "benchmarks", "planner"}  # (the first two are not installed)
    assert set(OUR_NAMES) == rooms | {"cli"}

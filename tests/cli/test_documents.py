"""Every command of every document: there is such a command, and it takes those options.

A block's line is parsed as the command itself parses it; words in a sentence, which may leave out
arguments, are held to the options there are. The tour and the README are run as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], key=lambda path: str(path))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
APP = typer.main.get_command(cli.app)

_FENCE = re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    .*\n|\n(?=    ))+)")
_COMMAND = re.compile(r"^\s*(planner (?!:)|make [a-z]|python (?:benchmarks|examples)/)")
_MAKE = re.compile(r"make [a-z-]+( [A-Z]+=\S+)*")


def lines_of_blocks(text: str) -> Iterator[str]:
    """Yield commands of code blocks, without comments; a line that ends in \\ goes on."""
    fenced = _FENCE.findall(text)
    for block in [*fenced, *_INDENTED.findall(_FENCE.sub("", text))]:
        for line in block.replace("\\\n", " ").splitlines():
            if _COMMAND.match(line):
                yield line.strip()


def inline(text: str) -> Iterator[str]:
    """Yield commands inside sentences."""
    for words in re.findall(r"`((?:planner|make) [^`]+)`", _FENCE.sub("", text)):
        yield " ".join(words.split())


def options_of(name: str) -> set[str]:
    """Return the options of a command, by all their names."""
    command = APP.commands[name]  # type: ignore[attr-defined]
    return {
        spelled
        for parameter in command.params
        for spelled in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}


def cases(found: str) -> list:
    pick = {"block": lines_of_blocks, "inline": inline}[found]
    return [
        pytest.param(line, id=f"{path.stem}: {line[:70]}")
        for path in DOCUMENTS
        for line in dict.fromkeys(pick(path.read_text()))
    ]


@pytest.mark.parametrize("line", cases("block"))
def test_a_line_of_a_block_is_parsed_by_its_command(line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert _MAKE.fullmatch(" ".join(words)), line
        assert words[1] in TARGETS
        return
    if words[0] == "python":
        script = ROOT / words[1]
        options = {word for word in words[2:] if word.startswith("--")}
        assert all(f'"{option}"' in script.read_text() for option in options), options
        return
    if words[1].startswith("-"):  # before the command: --plugin FILE
        words = [words[0], *words[3:]]
    command = APP.commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])  # raises a usage error


@pytest.mark.parametrize("line", cases("inline"))
def test_words_in_a_sentence_name_options_that_there_are(line):
    words = shlex.split(line)
    if words[0] == "make":
        assert _MAKE.fullmatch(line), line
        assert words[1] in TARGETS
        return
    if words[1] == "--help" or words[1].isupper():  # planner COMMAND ...
        return
    if words[1].startswith("-"):
        assert any(words[1] in parameter.opts for parameter in APP.params)
        words = [words[0], *words[3:]]
    given = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
    assert given <= options_of(words[1]), line


def test_every_command_is_in_the_documents():
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    for name in APP.commands:  # type: ignore[attr-defined]
        assert f"planner {name}" in text, name


def test_no_document_has_a_conflict_of_versions():
    """Such lines were once in the index of the documentation."""
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        assert not re.search(r"^(<{7} |={7}$|>{7} )", path.read_text(), re.M), path


NOT_HERE = ("ui", "launch", "compare", "calibrate", "convert", "verify", "profile", "timeline")
"""Commands that need ranks, a run or a browser: steps of the tour run most of them."""


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/tour.md"])
def test_lists_of_commands_run_in_their_order(planner, tmp_path, document):
    """Each as it stands; where no profile of this machine is, of a shipped one."""
    (tmp_path / "model.py").write_text((ROOT / "examples" / "gpt.py").read_text())
    ran = []
    for line in lines_of_blocks(_FENCE.sub("", (ROOT / document).read_text())):
        name, *words = shlex.split(line, comments=True)[1:]
        if not line.startswith("planner") or name in NOT_HERE or "--measure" in words:
            continue
        if name in ("search", "why"):
            words += ["--profile", "h100-sxm5-80gb"]
        if name == "check":
            words[0] = "--num-layers 32 --micro-batch-size 1 --bf16"
            words += ["--model", "llama-3-8b"]
        done = planner(name, *words)
        assert done.code in ((0, 1) if name == "doctor" else (0,)), f"{line}\n{done.stderr}"
        ran.append(name)
    assert {"search", "show", "why", "what-if", "emit", "check"} <= set(ran)

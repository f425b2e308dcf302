"""Scripts are read as a run would read them, without one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from planner.emit.shell import read_script

SCRIPT = r"""#!/bin/bash
GPUS=8
NODES=${NODES_GIVEN:-4} # of the cluster
WORLD=$(($GPUS*$NODES))
HALF=$((WORLD / 2))
DTYPE="fp8"
NAME='a $literal'
export LAYERS=32
EMPTY=
ARGS=(
    --num-layers $LAYERS \
    --world ${WORLD}
    --half $HALF
    --name "${NAME}"
    --left ${EMPTY:-unset}
)
if [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=(--fp8)
elif [ "$DTYPE" = bf16 ]; then
    ARGS+=(--bf16)
else
    ARGS+=(--fp32)
fi
if [ "$WORLD" -gt 16 ] && [[ -n "$DTYPE" ]]; then
    ARGS+=(--large)
fi
if [ -z "$DTYPE" ] || [ "$GPUS" -ne 8 ]; then
    ARGS+=(--odd)
fi
printf '%s ' "${ARGS[@]}"
"""
READ = "--num-layers 32 --world 32 --half 16 --name a $literal --left unset --fp8 --large"


def test_variables_arithmetic_and_conditions() -> None:
    script = read_script(SCRIPT)
    assert not script.unknown
    assert " ".join(script.text.split()) == f"printf '%s ' {READ} ;".replace(
        "a $literal", '"a $literal"'
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_run_reads_the_same() -> None:
    ran = subprocess.run(["bash", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == READ


def test_what_only_a_run_can_tell_is_left_out_and_named() -> None:
    script = read_script(
        """if [ -f "$HOME/x" ]; then
A=1
else
A=2
fi
if [[ $1 == y ]]; then
--yes
fi
--a $A $B
B=$(hostname)
--b $B
while [ $# -gt 0 ]; do
--loop
done
case $1 in
--x) A=3 ;;
esac
--a $A
"""
    )
    assert script.text == "--a 2 $B\n--b $B\n--a 2"
    assert script.unknown == (
        '[ -f "$HOME/x" ]',
        "[[ $1 == y ]]",
        "while [ $# -gt 0 ]",
        "case $1 in",
    )


@pytest.mark.parametrize(
    "text", ["A=$((1 +", "A='", 'if [ "', "fi", "done", "X=$((1/0))\n$X", "\\"]
)
def test_what_is_no_script_is_read_as_it_is(text: str) -> None:
    read_script(text)


WRITTEN = {
    "several on a line": "L=1; M=1\nL=4; M=2",
    "several of one export": "L=1\nexport L=4 M=2",
    "declared": "L=1\ndeclare -i L=4\nreadonly M=2",
    "a chain": "L=1\nL=4 && M=2",
    "a test before it": "L=1\n[ x = x ] && L=4\n[ x = y ] || M=2\n[ x = y ] && L=9",
    "an if on a line": "L=1\nif [[ x == x ]]; then L=4; M=2; else L=9; M=9; fi",
    "one within another": "if [ x = x ]; then\nif [ x = y ]; then\nL=9\nelse\nL=4\nfi\nM=2\nfi",
    "case": "S=7B\nL=1\ncase $S in\n 1B|2B) L=2 ;;\n 7*)\n L=4\n M=2\n ;;\n *) L=9 ;;\nesac",
    "functions": "small() {\n L=4\n M=2\n}\nfunction large { L=9; M=9; }\nsmall",
    "a here-document": "L=4\nM=2\ncat <<EOF > /dev/null\nL=9\nit's\nEOF",
    "an indented one": "L=4\nM=2\ncat <<-'END' > /dev/null\nL=9\n\tEND",
    "comments": "# L=1 \\\nL=4 # it's \\\nM=2",
    "arithmetic": "A=2\nL=$((A * A))\n((M=A))",
    "let": "A=2\nL=1\nlet L=A*2\nM=${N:=2}",
    "defaults in defaults": "L=${NONE:-${NONE_EITHER:-4}}\nM=2",
    "added to": "L=\nL+=4\nM='2'",
    "unset": "L=9\nunset L\nL=${L:-4}\nM=2",
    "Windows": "L=4\r\nM=2\r",
    "semicolons at the end": "L=4;\nM=2 ;",
    "a quoted text over lines": 'L="\\\n4"\nM=2',
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", WRITTEN)
def test_variables_are_set_as_bash_sets_them(name: str) -> None:
    text = WRITTEN[name] + "\n--layers $L --micro $M\n"
    ran = subprocess.run(
        ["bash", "-c", text.replace("\r", "").replace("--layers", "echo --layers")],
        capture_output=True,
        text=True,
        check=True,
    )
    read = read_script(text)
    lines = [line for line in read.text.splitlines() if line.startswith("--")]
    assert lines == [ran.stdout.strip()] == ["--layers 4 --micro 2"]
    assert not read.unknown


def test_arrays_stand_where_they_are_used() -> None:
    text = "OLD=(--layers 9)\nA=(\n  --layers 4 # of them\n  # --micro 1\n)\nA+=(--micro 2)\n"
    used = read_script(text + 'run "${A[@]}" > log &\nwait\n').text
    assert " ".join(used.split()) == "run --layers 4 --micro 2 > log ; wait ;"
    assert "--layers 9" in read_script(text).text  # (no command says which is used)


def test_what_only_a_run_can_tell_changes_no_variable() -> None:
    assert "$L" in read_script("L=4\nL=$(nproc)\n--layers $L").text
    assert "$L" in read_script("L=1\nL=$(nproc); M=2\n--layers $L").text


def test_values_grow_no_longer_than_a_word_can_be() -> None:
    text = read_script("A=xxxxxxxx\n" + "A=$A$A\n" * 60 + "--a $A").text
    assert len(text) < 1 << 18

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


def words_of(text: str) -> list[str]:
    inside = text.replace("ARGS+=(", " ").replace("ARGS=(", " ").replace(")", " ")
    return [word for word in inside.split() if word not in ("#!/bin/bash",)]


def test_variables_arithmetic_and_conditions() -> None:
    script = read_script(SCRIPT)
    assert not script.unknown
    words = " ".join(words_of(script.text)).replace('"', "")
    assert words.startswith(READ)


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
    assert script.unknown == ('[ -f "$HOME/x" ]', "[[ $1 == y ]]")


@pytest.mark.parametrize(
    "text", ["A=$((1 +", "A='", 'if [ "', "fi", "done", "X=$((1/0))\n$X", "\\"]
)
def test_what_is_no_script_is_read_as_it_is(text: str) -> None:
    read_script(text)

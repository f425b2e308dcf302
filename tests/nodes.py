"""Nodes of a cluster as network namespaces of this machine, joined by a bridge.

    node-a [eth0] ---- [a] switch [b] ---- [eth0] node-b        10.77.0.1, 10.77.0.2, ...

A process on a node has the node's host name, its address, and names of all nodes in its own
/etc/hosts.
All nodes share files, cores and memory. It takes root and Linux; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[1]


@cache
def why_not() -> str:
    """Why there can be no nodes on this machine; empty where there can be."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed (iproute2, util-linux)"
    try:
        with Nodes(2) as nodes:
            nodes.limit_rate("node-a", "100mbit")
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` is refused: {error.stderr.strip()}"
    return ""


@cache
def why_no_delay() -> str:
    """Why a link can't be delayed; empty where it can be."""
    return why_not() or ("" if os.access("/dev/net/tun", os.W_OK) else "there is no /dev/net/tun")


class Nodes:
    """So many nodes, gone with all their processes at the end. Mutable: it owns them."""

    def __init__(self, count: int, *, names_itself: bool = True) -> None:
        """Of nodes that do not name themselves, each one's own name stands for its loopback, as
        some installers write it into /etc/hosts.
        """
        self._names_itself = names_itself
        self.names = [f"node-{letter}" for letter in "abcdefgh"[:count]]
        self.address = {name: f"10.77.0.{at + 1}" for at, name in enumerate(self.names)}
        self._tag = f"planner-{secrets.token_hex(3)}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Nodes:
        try:
            self._folder = tempfile.TemporaryDirectory()
            for own in self.names:
                lines = [
                    f"{address if self._names_itself or name != own else '127.0.0.1'} {name}"
                    for name, address in self.address.items()
                ]
                self._hosts(own).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            self._ip("netns", "add", self._space("switch"))
            self._in("switch", "ip", "link", "add", "bridge", "type", "bridge")
            self._in("switch", "ip", "link", "set", "bridge", "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for name in (*self.names, "switch"):
            left = subprocess.run(
                ["ip", "netns", "pids", self._space(name)], capture_output=True, text=True
            )
            for pid in left.stdout.split():  # ranks that a killed launcher left
                subprocess.run(["kill", "-KILL", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
        self._folder.cleanup()

    def start(
        self,
        node: str,
        command: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a node, in a folder; its output is caught."""
        setup = f'hostname {node}; mount --bind {self._hosts(node)} /etc/hosts; exec "$@"'
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._space(node), "unshare", "--uts", "--mount",
             "sh", "-c", setup, "sh", *command],
            cwd=folder,
            env={**environment, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def limit_rate(self, node: str, rate: str) -> None:
        """Let a node's link carry so much ("50mbit") in each direction."""
        shape = ["root", "tbf", "rate", rate, "burst", "10kb", "latency", "50ms"]
        self._in(node, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        self._in("switch", "tc", "qdisc", "replace", "dev", node, *shape)

    def delay(self, node: str, seconds: float, *, loss: float = 0.0) -> None:
        """Let what a node sends come so much later, and lose this share of its frames."""
        command = [sys.executable, "-m", "tests.long_link", node, "bridge", str(seconds), str(loss)]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", self._space("switch"), *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == "frames pass\n"

    def cut(self, node: str) -> None:
        """Take a node's link down."""
        self._in("switch", "ip", "link", "set", node, "down")

    def block(self, node: str, other: str) -> None:
        """Let a node send nothing to another one."""
        self._in(node, "ip", "route", "add", "blackhole", f"{self.address[other]}/32")

    def _add(self, name: str) -> None:
        space = self._space(name)
        self._ip("netns", "add", space)
        self._in(name, "ip", "link", "set", "lo", "up")
        self._in("switch", "ip", "link", "add", name, "type", "veth",
                 "peer", "name", "eth0", "netns", space)  # fmt: skip
        self._in("switch", "ip", "link", "set", name, "master", "bridge", "up")
        self._in(name, "ip", "address", "add", f"{self.address[name]}/24", "dev", "eth0")
        self._in(name, "ip", "link", "set", "eth0", "up")

    def _hosts(self, name: str) -> Path:
        return Path(self._folder.name) / f"hosts-{name}"

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _in(self, name: str, *command: str) -> None:
        self._ip("netns", "exec", self._space(name), *command)

    @staticmethod
    def _ip(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True, text=True)

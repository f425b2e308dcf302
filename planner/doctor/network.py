"""The address that other ranks will be told, and the interfaces of this node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from planner.nodes.check import Check, judged

_ALONE = "ranks of this node alone are fine; for several nodes"

_NAMED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_network() -> Iterator[Check]:
    """Yield findings on this host's name, and on interfaces that the environment names.

    Gloo tells other ranks the address that the host's name stands for; where that is no address of
    this node, it tells the loopback, and ranks of other nodes wait for it in vain.
    """
    yield _check_name(socket.gethostname())
    here = {name for _, name in socket.if_nameindex()}
    for variable in _NAMED:
        if (given := os.environ.get(variable)) is None:
            continue
        wanted = [name.lstrip("^=") for name in given.split(",")]
        missing = [name for name in wanted if not any(own.startswith(name) for own in here)]
        if missing:
            found = f"{given}, not among {', '.join(sorted(here))}"
            yield judged(variable, found, problem=f"name one of them, or unset {variable}")
        else:
            yield judged(variable, given)


def _check_name(host: str) -> Check:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return judged(
            "host name",
            f"{host} stands for no address ({error.strerror or error})",
            warning=f"{_ALONE} add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
        where = str(address[0])
        if where.startswith("127.") or where == "::1":
            advice = f"{_ALONE} let DNS or /etc/hosts give its own, or set GLOO_SOCKET_IFNAME"
            return judged("host name", f"{host} is {where}, the loopback", warning=advice)
        return judged("host name", f"{host} is {where}")
    return judged(
        "host name",
        f"{host} stands for {found[0][4][0]}, which is no address of this node",
        warning=f"{_ALONE} correct DNS or /etc/hosts",
    )

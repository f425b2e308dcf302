"""A link of a namespace that delays frames and loses some, as netem would; kernels may lack that.

    python -m tests.long_link PORT BRIDGE SECONDS LOSS

A frame that comes out of PORT (a veth's end) goes on to BRIDGE after so many seconds, or is lost
with this probability; one from BRIDGE goes out of PORT at once. A tap is BRIDGE's end. Each frame
has the header of virtio before it, so that it stays what the kernel made it: longer than a link
allows, its checksum still to be computed. Prints a line when frames pass.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

TAP = "long-link"
LONGEST = 10 + 65_550
"""Bytes of virtio's header, and of a frame that is yet to be cut for the link."""

_SET_INTERFACE, _IS_TAP, _NO_PACKET_INFO, _HAS_HEADER = 0x400454CA, 0x2, 0x1000, 0x4000
_ALL_PROTOCOLS, _SOL_PACKET, _PACKET_HEADER, _WE_SENT = 0x3, 263, 15, 4


def relay(port: str, bridge: str, delay_s: float, loss: float) -> None:
    """Pass frames between a port and a bridge until the process is ended."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IS_TAP | _NO_PACKET_INFO | _HAS_HEADER
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", TAP.encode(), flags))
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    frames.setsockopt(_SOL_PACKET, _PACKET_HEADER, 1)
    frames.bind((port, _ALL_PROTOCOLS))
    for command in (("set", port, "nomaster"), ("set", TAP, "master", bridge, "up")):
        subprocess.run(["ip", "link", *command], check=True)
    print("frames pass", flush=True)
    drawn = random.Random(0)
    waiting: deque[tuple[float, bytes]] = deque()  # all wait equally long, so they leave in order
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([tap, frames], [], [], left_s)
        if frames in ready:
            frame, (_, _, kind, *_) = frames.recvfrom(LONGEST)
            if kind != _WE_SENT and drawn.random() >= loss:
                waiting.append((time.monotonic() + delay_s, frame))
        if tap in ready:
            frames.send(os.read(tap, LONGEST))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tap, waiting.popleft()[1])


if __name__ == "__main__":
    relay(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))

"""What a search assumes to be on the host: the optimizer, activations, both, or nothing."""

from __future__ import annotations

from typing import Literal

from costmodel.memory.bound import NOTHING, OnHost
from profiles import Profile

Offload = Literal["auto", "none", "optimizer", "activations", "both"]
OFFLOADS: tuple[Offload, ...] = ("auto", "none", "optimizer", "activations", "both")


def offload_fallbacks(offload: Offload, profile: Profile) -> tuple[tuple[OnHost, ...], ...]:
    """Return what to put on the host: fallbacks in turn until a plan fits, the fastest of each.

    A plan with nothing on the host comes first and, where there is one, alone: offload adds copies
    to it, and a device's time should not depend on its host's. Room on the device can be worth more
    than the copies all the same (Llama-3-70B on 64 H100, global batch 512: 78.4 s a step with both
    on the host, 79.1 s with neither), which only `offload` both finds. A CPU's memory is
    the host's already, so there nothing is moved unless the request says so.
    """
    plain, optimizer, activations = NOTHING, OnHost(optimizer=True), OnHost(activations=True)
    both = OnHost(optimizer=True, activations=True)
    if offload == "auto":
        if profile.cluster.device_type == "cpu":
            return ((plain,),)
        return ((plain,), (optimizer, activations), (both,))
    asked = {"none": plain, "optimizer": optimizer, "activations": activations, "both": both}
    return ((asked[offload],),)

"""The profile of a dry run: a shipped one that says its devices are CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profiles import load_profile


class CpuProfile:
    """A shipped profile that says its devices are CPUs, whose kernels a dry run imitates."""

    def __init__(self) -> None:
        self._profile = load_profile("h100-sxm5-80gb")
        self.cluster = replace(self._profile.cluster, device_type="cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)

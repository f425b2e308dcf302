"""Compiles C++ of the tests against the PyTorch that is here, once for each and text of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def compiler() -> str | None:
    """The C++ compiler that is here, if any."""
    return shutil.which("g++")


def built(source: Path) -> Path:
    """Return the library compiled of a file; PyTorch is found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    text = f"{importlib.metadata.version('torch')} {torch} {source.read_text()}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"planner-{source.stem}-{os.getuid()}-{key}.so"
    if built.exists():
        return built
    path = compiler()
    assert path is not None, f"g++ builds {source.name}"
    draft = built.with_suffix(f".{os.getpid()}")
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(
        [path, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(draft),
         f"-I{torch / 'include'}", *libraries],
        check=True,
    )  # fmt: skip
    draft.replace(built)  # (another test process may build it at the same time)
    return built

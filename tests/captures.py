"""Captures shared by the tests of one session, ranks included: each model is exported once.

A capture takes a second or two, and tests of everything after it ask for the same few tiny
models hundreds of times. Tests of capturing itself use `planner.capture`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import capture
from planner.language.graph import SAMPLE, ModelGraph, from_json, to_json
from planner.language.graph.batch import flatten_batch
from tests.builders import build_hf, tiny_models

FOLDER = "PLANNER_TEST_CAPTURES"  # set by tests/conftest.py; workers and ranks inherit it
_capture_module = capture.capture_module

if FOLDER not in os.environ:  # imported by a script, not by pytest
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="planner-captures-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)


def capture_module(module: torch.nn.Module, *batches: Any, **options: Any) -> ModelGraph:
    """As `planner.capture.capture_module`, or its answer to an equal earlier question."""

    def captured() -> ModelGraph:
        return _capture_module(module, *batches, **options)

    try:
        # As the signature has them: who names a default asks for the same.
        given = {"loss": None, "name": "model", "precision": "model", "unit": SAMPLE} | options
        given["loss"] = _code(given["loss"])
        asked = [_described(module), [_batch(batch) for batch in batches], sorted(given.items())]
    except _Indescribable:
        return captured()
    key = hashlib.sha256(repr((asked, torch.get_default_dtype())).encode()).hexdigest()
    entry = Path(os.environ[FOLDER]) / f"{key}.json"
    if entry.exists():
        return from_json(json.loads(entry.read_text()))
    graph = captured()
    keep(entry, to_json(graph))
    return graph


def keep(entry: Path, value: Any) -> None:
    """Write an entry of the folder at once, whichever processes write it, too."""
    draft = entry.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(value))
    with suppress(FileNotFoundError):  # what later ranks of a script without edits write is nothing
        draft.replace(entry)


def capture_tiny(name: str, **options: Any) -> ModelGraph:
    """Return the graph of one of `builders.tiny_models`; skip where it needs what is not there."""
    tiny = tiny_models()[name]
    if tiny.needs_transformers:
        pytest.importorskip("transformers")
    options = {"loss": tiny.loss, "name": name} | options
    return capture_module(tiny.build(), tiny.batch(2), tiny.batch(3), **options)


def capture_wide_llama(length: int, **sizes: int) -> ModelGraph:
    """Return two layers of a Llama in bf16 on sequences of a length; only its shapes exist."""
    return capture_wide("LlamaForCausalLM", length, max_position_embeddings=length, **sizes)


def capture_wide(family: str, length: int, **settings: int) -> ModelGraph:
    """Return a model of the library in bf16 on sequences of a length; only its shapes exist."""
    pytest.importorskip("transformers")

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    with torch.device("meta"):
        model = build_hf(family, **settings)
        return capture_module(model.to(torch.bfloat16), batch(2), batch(3), name=family)


class _Indescribable(Exception):
    """A model holds something that cannot be told from something else by a text."""


def _described(module: torch.nn.Module) -> list[Any]:
    """What a module computes: the code and settings of its parts, its tensors and their ties."""
    seen: dict[int, str] = {}
    parts: list[Any] = []
    for path, part in module.named_modules(remove_duplicate=False):
        tensors = [*part._parameters.items(), *part._buffers.items()]
        parts.append(
            (
                path,
                seen.setdefault(id(part), path),
                _code(type(part).forward),
                [
                    (n, *_tensor(t), seen.setdefault(id(t), f"{path}.{n}"))
                    for n, t in tensors
                    if t is not None
                ],
                [(k, _setting(v)) for k, v in sorted(vars(part).items()) if k not in _HELD],
            )
        )
    return parts


_HELD = (
    *("_parameters", "_buffers", "_modules"),
    "_is_hf_initialized",  # read while weights get values alone, which those on meta have not
    # Of saving and loading alone: an engine has some on the module it was given.
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _tensor(tensor: torch.Tensor) -> Any:
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise _Indescribable
    return type(tensor).__name__, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _setting(value: Any) -> Any:
    if isinstance(value, types.FunctionType | types.MethodType):
        return _code(value)
    if isinstance(value, types.BuiltinFunctionType | type):
        return value.__module__, value.__qualname__
    if isinstance(value, list | tuple):
        return [_setting(each) for each in value]
    text = repr(sorted(value) if isinstance(value, set) else value)
    if " at 0x" in text or isinstance(value, torch.Tensor):
        raise _Indescribable
    return text


def _code(function: Any) -> Any:
    """What a function does: its names and byte code, and what it closes over."""
    function = getattr(function, "__func__", function)
    if function is None:
        return None
    if not isinstance(function, types.FunctionType):
        raise _Indescribable
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    # __class__ is what super() takes; a function that holds itself would not end.
    closed = [_setting(each) for each in held if each is not function]
    # A model file of the same text is the same model in each test's own folder; what a forward
    # calls there is not in its own code.
    module = re.sub(r"(?<=^planner_user_)(.*)_\w{8}$", r"\1", function.__module__)
    text = ""
    if module != function.__module__:
        text = hashlib.sha256(Path(function.__code__.co_filename).read_bytes()).hexdigest()
    return module, text, function.__qualname__, _bytes(function.__code__), closed


def _bytes(code: types.CodeType) -> Any:
    constants = [_bytes(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    line = Path(code.co_filename).name, code.co_firstlineno  # an op's line is kept with it
    return line, code.co_code, code.co_names, constants


def _batch(batch: Any) -> Any:
    tensors, tree = flatten_batch(batch)
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}, repr(tree)

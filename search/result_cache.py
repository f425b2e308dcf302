"""Answers kept on disk, so that the same question is searched once.

The key is a digest of all an answer follows from: the model's structure, the profile's
numbers, the request, and the code that prices and searches. Any difference means a fresh
search. A time limit is no part of the key: what it cut short is not kept, as another run may get
further, and a search that ended in time has the answer of one without a limit.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.execution import find_execution
from costmodel.table.kernels import has_rates, load_rates
from planner.cache_folder import cache_dir, write_entry
from planner.deadline import OutOfTime, is_interrupted
from planner.files import ROOT
from planner.language.graph import ModelGraph
from planner.language.ops.users import rule_digests
from planner.language.plan import Plan
from planner.plugins import plugin_digests
from profiles import Profile
from search.branch_and_bound import Progress
from search.candidates import Candidates, CandidatesOf
from search.find_plan import FirstLook, find_plan
from search.report.riskier import find_riskier
from search.request import Certificate, RunnerUp, SearchRequest, SearchResult

_ROOMS = ("search", "costmodel", "profiles", "planner")
_PLANS = ("plan", "leanest", "riskier")


def find_plan_once(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    *,
    progress: Progress | None = None,
    use_cache: bool = True,
    candidates_of: CandidatesOf = Candidates.of,
    first_look: FirstLook | None = None,
    names_riskier: bool = False,
) -> SearchResult:
    """Return `find_plan`'s answer, searched now or kept from an equal earlier question; with
    `names_riskier` beside it the plan that would be faster if memory were as estimated.

    Raises as `find_plan` does. A cache that can't be read or written is only slower.
    """
    unlimited = replace(request, time_limit_s=None)
    digest = question_digest(graph, profile, unlimited)
    entry = cache_dir() / "plans" / f"{digest}{'-riskier' * names_riskier}.json"
    if use_cache and (kept := _read(entry)) is not None:
        return kept
    result = find_plan(
        graph, profile, request, progress, candidates_of=candidates_of, first_look=first_look
    )
    if names_riskier:
        with suppress(OutOfTime):  # the answer stands without it
            riskier = find_riskier(graph, profile, request, result, candidates_of)
            result = replace(result, riskier=riskier)
    cut_short = (request.time_limit_s is not None or is_interrupted()) and (
        result.certificate is None or result.certificate.stopped_early
    )
    if use_cache and not cut_short:
        write_entry(entry, json.dumps(to_json(result)))
    return result


def question_digest(graph: ModelGraph, profile: Profile, request: SearchRequest) -> str:
    """Return what names a question: equal digests have equal answers."""
    digest = hashlib.sha256(graph.fingerprint.encode())
    digest.update(
        repr(
            (
                graph.name,
                graph.outside_bytes,
                profile.file,
                profile.host,
                profile.ops,
                profile.collectives,
            )
        ).encode()
    )
    for each in (profile, *(group.profile for group in profile.groups)):
        rates = load_rates(each) if has_rates(each) else None
        digest.update(repr(rates).encode())
    for group in profile.groups:
        own = group.profile
        told = group.name, group.num_devices, own.file, own.ops, own.collectives
        digest.update(repr(told).encode())
    digest.update(repr((request, find_execution(request.execution))).encode())
    digest.update(repr((plugin_digests(), rule_digests())).encode())
    digest.update(_code_digest())
    return digest.hexdigest()[:32]


@cache
def _code_digest() -> bytes:
    """The code that prices and searches; what this process has loaded stays as it is."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.digest()


def to_json(result: SearchResult) -> dict[str, Any]:
    """Return an answer as JSON data; `from_json` is the inverse."""
    data = {f.name: getattr(result, f.name) for f in fields(result)}
    for name in _PLANS:
        plan = getattr(result, name)
        data[name] = plan and plan.model_dump(mode="json")
    data["next_best"] = [plan.model_dump(mode="json") for plan in result.next_best]
    data["runners_up"] = [asdict(runner_up) for runner_up in result.runners_up]
    data["certificate"] = result.certificate and asdict(result.certificate)
    return data


def from_json(data: dict[str, Any]) -> SearchResult:
    """Inverse of `to_json`; raise ValueError, KeyError or TypeError on bad data."""
    proof = data["certificate"]
    if proof is not None:
        for name in ("pruned", "proved_by"):
            proof[name] = tuple((rule, value) for rule, value in proof[name])
    return SearchResult(
        **{
            **data,
            **{name: data[name] and Plan.model_validate(data[name]) for name in _PLANS},
            "next_best": tuple(map(Plan.model_validate, data["next_best"])),
            "runners_up": tuple(map(_runner_up, data["runners_up"])),
            "reasons": tuple(data["reasons"]),
            "certificate": None if proof is None else Certificate(**proof),
        }
    )


def _runner_up(data: dict[str, Any]) -> RunnerUp:
    return RunnerUp(**{**data, "differences": tuple(map(tuple, data["differences"]))})


def _read(entry: Path) -> SearchResult | None:
    try:
        result = from_json(json.loads(entry.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(result, was_kept=True)

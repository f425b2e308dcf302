"""Candidates kept from search to search, for questions that are asked one after another."""

from __future__ import annotations

from collections import OrderedDict

from costmodel.memory.bound import OnHost
from planner.language.across.cut.whole_batch import run_whole
from planner.language.graph import ModelGraph
from profiles import Profile
from search.candidates import Candidates
from search.request import SearchRequest

_OWN_FIELDS = (
    "num_devices", "model_file", "precision", "execution", "solver", "receive_ahead", "overlap",
    "logits", "meshes", "clip_gradients", "accept", "pins", "balance", "split_rank", "axes",
)  # fmt: skip
"""What of a request its candidates follow from."""


class KeptCandidates:
    """Candidates of the latest requests: the next search that differs from one of them in batch,
    memory or fixed choices alone does not price the model again. Mutable.

    Models and profiles are told apart as objects.
    """

    def __init__(self, *, most: int = 8) -> None:
        self._most = most
        self._kept: OrderedDict[tuple, tuple[Candidates, ModelGraph, Profile]] = OrderedDict()

    def __call__(
        self, graph: ModelGraph, profile: Profile, request: SearchRequest, on_host: OnHost
    ) -> Candidates:
        """Return `Candidates.of` these, kept from an earlier call where it is the same."""
        own = tuple(getattr(request, name) for name in _OWN_FIELDS)
        # Where ops run on the whole batch, its size is in the graph.
        whole = run_whole(graph, request.global_batch, num_microbatches=1, accept=request.accept)
        batch = 0 if whole is graph else request.global_batch
        key = id(graph), id(profile), on_host, own, batch
        if key not in self._kept:
            # The graph and the profile are kept, too, so that no others have their ids.
            made = Candidates.of(graph, profile, request, on_host)
            self._kept[key] = made, graph, profile
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return self._kept[key][0]

"""Search: the best plan for a model on a cluster, in seconds, and how sure that is.

`find_plan(graph, profile, SearchRequest(...))` is the front door. Inside a block class an exact
solver chooses op placements (`layouts`), across blocks dynamic programming cuts stages
(`chain_dp`), and outside branch and bound goes through degrees, microbatches and schedules
(`find_plan`). Torch-free.
"""

from search.find_plan import find_plan
from search.report.concessions import Advice, Concession, find_advice
from search.report.pareto import Point, find_pareto
from search.request import Certificate, RunnerUp, SearchRequest, SearchResult
from search.result_cache import find_plan_once

__all__ = [
    "Advice",
    "Certificate",
    "Concession",
    "Point",
    "RunnerUp",
    "SearchRequest",
    "SearchResult",
    "find_advice",
    "find_pareto",
    "find_plan",
    "find_plan_once",
]

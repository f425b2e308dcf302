"""Search: the fastest plan of a model on a cluster under the cost model, and the proof of it.

In come a `ModelGraph`, a `Profile` and a `SearchRequest`; out comes a `SearchResult`: the plan, its
certificate, runners-up. Torch-free. Read in this order:

    request                what is asked and answered, as data
    find_plan              the search on one page
    branch_and_bound       the queue of nodes; `search_state`: what the nodes of one request share
    space/                 the configurations there are, and their job tables
    nodes/                 sets of plans: degrees, shapes, configurations, partitions
    meshes/                the same where stages have meshes or devices of their own
    candidates             what configurations share: layouts, tables, estimates
                           (`kept_candidates`: from one search to the next)
    priced_configuration   what each can be asked: chain problem, cuts, plan
    bounds/                lower bounds of step time and memory
    op_layout/             placements inside a block; `stages/` what runs of blocks cost with them
    partition/             stage boundaries; `ilp/` both as integer programs
    report/                what people read
    result_cache           answers kept on disk
"""

from search.find_plan import FirstLook, find_plan
from search.kept_candidates import KeptCandidates
from search.report.pareto import Point, find_pareto
from search.report.remedies import Advice, Remedy, find_advice
from search.request import Certificate, RunnerUp, SearchRequest, SearchResult
from search.result_cache import find_plan_once

__all__ = [
    "Advice",
    "Certificate",
    "FirstLook",
    "KeptCandidates",
    "Point",
    "Remedy",
    "RunnerUp",
    "SearchRequest",
    "SearchResult",
    "find_advice",
    "find_pareto",
    "find_plan",
    "find_plan_once",
]

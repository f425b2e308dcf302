# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # A plan from Python
# What `planner search`, `estimate` and `show` do, as functions: a model file becomes a graph, a
# machine a profile, a question a plan. Nothing is trained, and no GPU is needed.

# %%
from dataclasses import replace
from pathlib import Path

import profiles
import search
from costmodel import estimate
from planner.capture.source.capture_cache import load_graph
from planner.language.plan import load_plan, save_plan
from planner.units import format_bytes, format_seconds

EXAMPLES = Path(__file__).resolve().parents[1] if "__file__" in globals() else Path("..").resolve()

# %%
graph = load_graph(EXAMPLES / "gpt.py")  # captured without weights, and kept for the next time
profile = profiles.load_profile("h100-sxm5-80gb")
request = search.SearchRequest(num_devices=8, global_batch=64, model_file=str(EXAMPLES / "gpt.py"))
result = search.find_plan_once(graph, profile, request)
plan = result.plan
print(f"{plan.schedule} on dp={plan.dp} tp={plan.tp} pp={plan.pp}, ZeRO {plan.zero_stage}")
print(f"gap to the lower bound: {result.certificate.gap:.1%}")

# %% [markdown]
# An estimate keeps its parts: seconds by cause, the mean over ranks, and bytes on every rank.

# %%
found = estimate(graph, profile, plan)
print(format_seconds(found.step_s), "a step,", format_bytes(found.peak_bytes), "at most")
for part, seconds in found.path.parts.items():
    if seconds:
        print(f"  {part.removesuffix('_s'):12} {format_seconds(seconds)}")

# %% [markdown]
# Any choice can be fixed; the rest is searched around it.

# %%
for pp in (1, 2, 4):
    other = search.find_plan_once(graph, profile, replace(request, pp=pp)).plan
    print(f"pp={pp}: {format_seconds(other.estimate['step_s'])}")

# %% [markdown]
# A plan is a JSON file. `planner.apply("plan.json", model)` trains by it.

# %%
save_plan(plan, "plan.json")
assert load_plan("plan.json") == plan

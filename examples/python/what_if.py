# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # What if
# Other numbers of devices, other machines, slower links: each is a search of its own, in a table
# that pandas sorts and plotly draws.

# %%
from pathlib import Path

import pandas as pd
import plotly.express as px

import profiles
from planner.capture.source.capture_cache import load_graph
from search.report.what_if import Case, Explorer

EXAMPLES = Path(__file__).resolve().parents[1] if "__file__" in globals() else Path("..").resolve()
MODEL = EXAMPLES / "gpt.py"

# %%
explorer = Explorer(
    model=MODEL,
    graph_of=lambda precision, length, arguments: load_graph(
        MODEL, precision=precision, length=length, arguments=arguments
    ),
    profile_of=profiles.load_profile,
)
base = Case(
    num_devices=8,
    profile="a100-sxm4-80gb",
    memory_limit_bytes=None,
    link_rate=1.0,
    global_batch=64,
    length=None,
    precision="model",
    execution="ours-eager",
)
cases = base.varied(
    num_devices=(4, 8, 16), profile=("a100-sxm4-80gb", "h100-sxm5-80gb"), link_rate=(1, 0.25)
)

# %%
table = pd.DataFrame(
    {
        "devices": answer.case.num_devices,
        "machine": answer.case.profile,
        "links": answer.case.link_rate,
        "step_ms": 1e3 * answer.step_s,
        "tokens_per_s": answer.tokens_per_s,
        "days_of_1e9_tokens": answer.days(1e9),
        "money": answer.cost(2.5, 1e9),
    }
    for answer in explorer.answers(cases)
)
print(table.sort_values("tokens_per_s").to_string(index=False))

# %% [markdown]
# Slower links between nodes cost nothing inside a node of eight.

# %%
figure = px.line(
    table, x="devices", y="tokens_per_s", color="machine", line_dash="links", markers=True
)
figure.write_html("what-if.html", include_plotlyjs="cdn")
inside = table[table.devices <= 8].groupby(["devices", "machine"]).step_ms.nunique()
assert (inside == 1).all()

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # A training described by numbers
# No model file: a row of sizes and degrees is a graph, a plan and a runtime, priced by the cost
# model of captured models (`planner estimate --batch`).

# %%
from costmodel.table.rows.rows import estimate_rows

ROW = {
    "model": "Llama-3-8B",
    "gpu": "H100-SXM5-80GB",
    "gpus": 64,
    "seq_len": 8192,
    "global_batch": 512,
    "micro_batch": 1,
    "tp": 1,
    "pp": 1,
    "stack": "torchtitan",
}

# %%
rows = [dict(ROW, tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 1), (4, 2), (8, 1))]
for row in estimate_rows(rows):
    step_s, why = row["predicted_step_time_s"], row["reason"]
    print(f"tp={row['tp']} pp={row['pp']}:", f"{step_s:.2f} s a step" if step_s else why)

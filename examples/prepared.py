"""A training loop that stays as it is, of one device or of a plan: two lines differ.

planner search examples/gpt.py --gpus 2 --global-batch 8
planner launch plan.json examples/prepared.py
python examples/prepared.py             # in one process
"""

import os

import gpt
import loop
import torch

STEPS, BATCH = 20, 8

torch.manual_seed(0)
model = gpt.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
text = loop.standard_library_text().long()
stretches = text[: BATCH * STEPS * (gpt.SEQUENCE + 1)].view(-1, gpt.SEQUENCE + 1)
data = torch.utils.data.TensorDataset(stretches[:, :-1], stretches[:, 1:])
loader = torch.utils.data.DataLoader(data, batch_size=BATCH)

if "WORLD_SIZE" in os.environ:
    import planner

    model, optimizer, loader, scheduler = planner.prepare(
        "plan.json", model, optimizer, loader, scheduler
    )

for step, (tokens, targets) in enumerate(loader, 1):
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if os.environ.get("RANK", "0") == "0" and step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)

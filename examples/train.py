"""Train examples/gpt.py on the text of the Python standard library's own source."""

import gpt
import loop
import planner
import torch

STEPS = 30

torch.manual_seed(0)
network = gpt.model()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
engine = planner.apply("plan.json", network, optimizer=optimizer)
log = loop.Log(STEPS)
for batch in loop.batches(STEPS, batch_size=8, sequence=gpt.SEQUENCE):
    loss = engine.step(batch)
    log(loss)
log.close()

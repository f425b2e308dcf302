"""What the examples of a whole training share: the loop of a run that its launcher keeps."""

import planner
import torch

WARM_UP_STEPS = 10


def train(engine, optimizer, dataset, steps):
    """Train up to `steps` updates, from the newest checkpoint of the run if there is any."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP_STEPS) * (1 - step / steps)
    )
    loader = engine.loader(dataset, shuffle=True)
    engine.resume(extra={"scheduler": scheduler, "loader": loader})
    planner.StepLog(engine, every=1, folder="logs", to=("console", "jsonl"))
    while engine.steps < steps:
        for part in loader:  # a pass, or what is left of it
            engine.step(part)
            scheduler.step()
            engine.keep(now=engine.steps == steps)
            if engine.steps == steps:
                break

"""An ordinary training loop for one process: nothing in it is of planner.

planner search examples/gpt.py --gpus 2 --global-batch 8
planner launch --unmodified plan.json examples/ordinary.py
python examples/ordinary.py             # in one process: the same losses
"""

import gpt
import loop
import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH = 2, 80, 8


def main():
    torch.manual_seed(0)
    model = gpt.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = loop.standard_library_text().long()
    stretches = text[: 2 * SAMPLES * (gpt.SEQUENCE + 1)].view(2 * SAMPLES, -1)
    training, held_out = (
        TensorDataset(part[:, :-1], part[:, 1:]) for part in stretches.split(SAMPLES)
    )
    loader = DataLoader(training, batch_size=BATCH, shuffle=True)
    evaluation = DataLoader(held_out, batch_size=BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=EPOCHS * len(loader)
    )
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for step, (tokens, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.6f} norm {norm:.4f}")
        model.eval()
        with torch.no_grad():
            losses = [model(tokens, targets).item() for tokens, targets in evaluation]
        print(f"epoch {epoch} held out {sum(losses) / len(losses):.6f}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ordinary.pt")


if __name__ == "__main__":
    main()

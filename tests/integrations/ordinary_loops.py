"""Loops of training scripts for one process, for `planner launch --unmodified`: by name, the body.

Each has `model`, `optimizer`, `loader` and `held_out` (DataLoaders of x and y) and notes numbers by
`note`. Nothing in them is of planner.
"""

PRELUDE = """
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, SAMPLES, BATCH = 6, 20, 8
noted = []


def note(*values):
    noted.extend(torch.as_tensor(value).item() for value in values)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, y=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        if y is None:
            return F.log_softmax(logits, dim=-1)
        return F.cross_entropy(logits, y)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(SAMPLES, WIDTH), torch.randint(4, (SAMPLES,))
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
held_out = DataLoader(TensorDataset(x, y), batch_size=11)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
"""

END = """
torch.save(model.state_dict(), sys.argv[1] + ".pt")
with open(sys.argv[1], "w") as file:
    json.dump(noted, file)
"""

LOSS_OF_THE_MODEL = {
    "plain": """
for _ in range(2):
    for a, b in loader:
        loss = model(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(loss)
""",
    "value before backward, clipping, scheduler": """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
total = 0.0
for _ in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = model(x=a, y=b)
        total += loss.detach()
        note(loss.item())
        loss.backward()
        note(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        scheduler.step()
    note(total, scheduler.get_last_lr()[0])
""",
    "accumulation": """
optimizer.zero_grad()
for _ in range(2):
    for step, (a, b) in enumerate(loader, 1):
        loss = model(a, b) / 3
        loss.backward()
        note(loss)
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "steps that are left out": """
for _ in range(2):
    for step, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(a, b)
        (loss * 0.5).backward()
        if step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        note(loss)
""",
    "evaluation, state of model and optimizer": """
best = None
for epoch in range(3):
    model.train()
    for a, b in loader:
        model.zero_grad()
        model(a, b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(-1) == b).sum().item() for a, b in held_out)
        loss = sum(model(a[:8], b[:8]) + model(a[:1], b[:1]) for a, b in held_out)
    note(right, loss)
    if epoch == 1:
        best = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    note(*(state[n][name].norm() for n in state for name in ("step", "exp_avg", "exp_avg_sq")))
model.load_state_dict(best)
model.train()
for a, b in loader:
    optimizer.zero_grad()
    loss = model(a, b)
    loss.backward()
    optimizer.step()
    note(loss)
torch.save(model, sys.argv[1] + ".model")
note(torch.load(sys.argv[1] + ".model", weights_only=False).head.weight.norm())
""",
}
"""Loops of a model that returns its loss."""

LOSS_OF_THE_SCRIPT = {
    "criterion": """
criterion = nn.NLLLoss()
for _ in range(2):
    for a, b in loader:
        output = model(a)
        loss = criterion(output, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(loss)
""",
    "criterion, what it returned, accumulation": """
criterion = nn.NLLLoss()
for _ in range(2):
    optimizer.zero_grad()
    for step, (a, b) in enumerate(loader, 1):
        output = model(a)
        loss = criterion(output, b)
        loss /= 3
        guessed = output.argmax(-1)
        loss.backward()
        note(loss, (guessed == b).sum(), output.exp().max())
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        note(*(criterion(model(a), b) for a, b in held_out))
    model.train()
""",
}
"""Loops of a model whose loss the script computes."""

LOSS_OF_THE_SCRIPT |= {
    "what it returned, read behind the update": """
for _ in range(2):
    right = 0
    kept = []
    for a, b in loader:
        output = model(a)
        _, guessed = torch.max(output, 1)
        loss = F.nll_loss(output, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += torch.sum(guessed == b)
        kept.append(output.detach())
        note((output.argmax(1) == b).double().mean())
    note(right, torch.cat(kept).sum())
""",
    "what it returned, written into": """
for _ in range(2):
    for a, b in loader:
        output = model(a).clone()
        output[:, 0] = 0
        shown = output[:, 1:]
        shown += 1
        F.relu(shown, inplace=True)
        loss = F.cross_entropy(shown, b.clamp(max=2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(loss)
""",
}

REFUSED = {
    "a state dict written to": (
        """
a, b = next(iter(loader))
model(a, b).backward()
optimizer.step()
with torch.no_grad():
    model.state_dict()["head.weight"].zero_()
""",
        r"`model.state_dict\(\)\[.*zero_\(\)`: a value of model.state_dict\(\) is written to",
    ),
    "a state dict kept without a copy": (
        """
for a, b in loader:
    optimizer.zero_grad()
    model(a, b).backward()
    optimizer.step()
    best = model.state_dict()
    best["head.weight"].sum()
    model.load_state_dict(best)
    kept = best
    optimizer.zero_grad()
    model(a, b).backward()
    optimizer.step()
    torch.save(kept, sys.argv[1] + ".best")
""",
        r"`torch.save\(kept.*`: a value of model.state_dict\(\) is read after a later update",
    ),
    "gradients by hand": (
        """
a, b = next(iter(loader))
model(a, b).backward()
for p in model.parameters():
    p.grad.mul_(0.5)
""",
        r":\d+: `p.grad.mul_\(0.5\)`: mul_ needs the values of the gradient of layers.0.weight",
    ),
    "a penalty on weights": (
        """
for a, b in loader:
    optimizer.zero_grad()
    loss = model(a, b)
    note(loss)
    loss = loss + sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
""",
        r"`loss = loss \+ sum.*`: pow needs the values of layers.0.weight",
    ),
    "no zero_grad": (
        """
for a, b in loader:
    model(a, b).backward()
    optimizer.step()
""",
        r":\d+: `model\(a, b\).backward\(\)`: gradients of the update before were not cleared",
    ),
    "other factors": (
        """
for factor, (a, b) in enumerate(loader, 1):
    (model(a, b) * factor).backward()
optimizer.step()
""",
        r"`optimizer.step\(\)`: losses of an update have different factors \(1 and 2\)",
    ),
    "a loss without backward": (
        """
(a, b), (c, d), *_ = loader
note(model(a, b))
model(c, d).backward()
optimizer.step()
""",
        r"`optimizer.step\(\)`: the value of a loss was read and the loss had no backward",
    ),
    "a part of the gradients clipped": (
        """
a, b = next(iter(loader))
model(a, b).backward()
nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
""",
        r"`nn.utils.clip_grad_norm_.*`: clip_grad_norm_ of 2 of the model's 8 parameters",
    ),
    "gradients clipped by value": (
        """
a, b = next(iter(loader))
model(a, b).backward()
nn.utils.clip_grad_value_(model.parameters(), 1.0)
""",
        "clip_grad_value_ clips elements of gradients",
    ),
    "autograd.grad": (
        """
a, b = next(iter(loader))
torch.autograd.grad(model(a, b), model.parameters())
""",
        "torch.autograd.grad of what the model returned",
    ),
    "a scaler": (
        """
scaler = torch.amp.GradScaler("cpu")
a, b = next(iter(loader))
scaler.scale(model(a, b)).backward()
""",
        "a GradScaler scales the loss",
    ),
    "autocast": (
        """
a, b = next(iter(loader))
with torch.autocast("cpu", torch.bfloat16):
    model(a, b).backward()
""",
        "`model.a, b..backward..`: the model is called under autocast",
    ),
    "another module's parameters": (
        """
other = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
a, b = next(iter(loader))
model(other(a), b).backward()
""",
        "trains 8 parameters beside those of the Linear",
    ),
    "a second model that trains": (
        """
other = nn.Linear(WIDTH, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
a, b = next(iter(loader))
model(a, b).backward()
other(a).sum().backward()
second.step()
""",
        r"`second.step\(\)`: a second optimizer \(SGD\) trains beside the AdamW of the Net",
    ),
    "another batch": (
        """
model(x=next(iter(loader))[0]).sum().backward()
""",
        "its loss 0 other tensors, and the plan's batches have y",
    ),
    "training mode without gradients": (
        """
a, b = next(iter(loader))
optimizer.zero_grad()
model(a, b).backward()
optimizer.step()
with torch.no_grad():
    model(a, b)
""",
        "the model is called in training mode without gradients",
    ),
    "the optimizer's state loaded in the midst": (
        """
a, b = next(iter(loader))
model(a, b).backward()
optimizer.load_state_dict(optimizer.state_dict())
""",
        "optimizer.load_state_dict in the midst of a training",
    ),
    "processes of its own": (
        """
import torch.distributed
torch.distributed.init_process_group("gloo")
""",
        "the script joins processes of its own",
    ),
    "the optimizer's state cleared": (
        """
for epoch in range(2):
    optimizer.state.clear() if epoch else None
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()
""",
        "optimizer.state is read or changed after the first step",
    ),
    "the optimizer's state replaced": (
        """
for epoch in range(2):
    optimizer.state = {} if epoch else optimizer.state
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()
""",
        "optimizer.state is read or changed after the first step",
    ),
    "other parameters in a group": (
        """
for epoch in range(2):
    if epoch:
        optimizer.param_groups[0]['params'] = list(model.head.parameters())
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()
""",
        "parameters of optimizer.param_groups were changed",
    ),
    "values put into a weight": (
        """
for epoch in range(2):
    if epoch: model.head.weight.data = torch.zeros(4, WIDTH)
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()
""",
        "other values are put into head.weight",
    ),
    "gradients that nothing clears": (
        """
del optimizer.param_groups[0]['params'][:-2]
for epoch in range(2):
    pass
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
""",
        "clip_grad_norm_ counts gradients of 6 parameters that the optimizer has not",
    ),
    "a refusal that is caught": (
        """
for epoch in range(2):
    pass
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        try:
            [p.grad.mul_(2) for p in model.parameters()]
        except Exception:
            pass
        optimizer.step()
""",
        "mul_ needs the values of the gradient",
    ),
    "a model on several devices": (
        """
model = nn.DataParallel(model)
for epoch in range(2):
    pass
    for a, b in loader:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()
""",
        "the model is wrapped by DataParallel",
    ),
    "gradients of the batch": (
        """
for a, b in loader:
    a.requires_grad_()
    model(a, b).backward()
    optimizer.zero_grad()
    model(a + 0.1 * a.grad.sign(), b).backward()
    optimizer.step()
""",
        "`model.a, b..backward..`: the model is called with a tensor that requires a gradient",
    ),
    "gradients of the batch, in evaluation mode": (
        """
for a, b in loader:
    optimizer.zero_grad()
    model(a, b).backward()
    optimizer.step()
    model.eval()
    model(a.requires_grad_(), b).backward()
    model.train()
""",
        "the model is called with a tensor that requires a gradient",
    ),
    "a backward in evaluation mode": (
        """
for a, b in loader:
    optimizer.zero_grad()
    model(a, b).backward()
    optimizer.step()
    model.eval()
    (2 * model(a, b)).backward()
    model.train()
""",
        "backward of what the model returned in evaluation mode",
    ),
    "a batch written into before its backward": (
        """
for a, b in loader:
    optimizer.zero_grad()
    loss = model(a, b)
    a.zero_()
    loss.backward()
    optimizer.step()
""",
        r"`loss.backward\(\)`: a tensor of shape \[8, 6\] is written into before",
    ),
    "a hook on what it returned": (
        """
a, b = next(iter(loader))
loss = model(a, b)
loss.register_hook(lambda grad: 2 * grad)
loss.backward()
optimizer.step()
""",
        r"`loss.register_hook\(.*`: register_hook of what the model returned",
    ),
    "what forward leaves in an attribute, in the loss": (
        """
class Aux(Net):
    aux = 0.0

    def forward(self, x, y=None):
        self.aux = x.mean() + self.head.weight.pow(2).mean()
        return super().forward(x, y)

model.__class__ = Aux
for a, b in loader:
    optimizer.zero_grad()
    loss = model(a, b) + 0.5 * model.aux
    loss.backward()
    optimizer.step()
""",
        r"`loss = model\(a, b\) .*`: the script uses a tensor that the model's forward",
    ),
    "what a hook keeps": (
        """
kept = {}
model.head.register_forward_hook(lambda module, given, output: kept.update(out=output.detach()))
for a, b in loader:
    optimizer.zero_grad()
    model(a, b).backward()
    optimizer.step()
    note(kept["out"].pow(2).mean())
""",
        r"`note\(kept.*`: the script uses a tensor that the model's forward leaves behind",
    ),
    "an autograd function in the loss": (
        """
class Above(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 1

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

a, b = next(iter(loader))
Above.apply(model(a, b)).backward()
""",
        "to the autograd function Above, whose backward would be lost",
    ),
    "no training": ("", "ended without a training step"),
}
"""By name: a loop, and what it is refused with."""

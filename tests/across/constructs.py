"""What people write, across samples or not: a body for each, as the forward of one small module.

`ALONE` are bodies that compute samples alone and return their mean loss, `MADE_WHOLE` others whose
parts take what they need from the whole batch, `ACROSS` those with findings, of these kinds, and
`NAMED_ALL_THE_SAME` those with findings that do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH, CLASSES, EXPERTS = 8, 4, 5, 3

Body = Callable[["Model", dict[str, Tensor]], Tensor]


class Model(nn.Module):
    """Parts that bodies use; those a body leaves out have no gradient."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.fc, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.gate = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, EXPERTS)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv, self.group_norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH)
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.weight = nn.Parameter(torch.rand(CLASSES) + 0.5, requires_grad=False)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("queue", torch.randn(7, WIDTH))
        self.register_buffer("direction", torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, ids: Tensor, label: Tensor) -> Tensor:
        return self.body(self, {"x": x, "y": y, "mask": mask, "ids": ids, "label": label})


def batch(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A batch whose samples differ in all they can, how much of each is masked included."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    mask = (torch.rand(size, LENGTH, generator=generator) > 0.4).to(dtype)
    mask[:, 0] = 1
    ids = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
    label = torch.randint(0, CLASSES, (size,), generator=generator)
    return {"x": x, "y": y, "mask": mask, "ids": ids, "label": label}


def _rows(b: dict[str, Tensor]) -> Tensor:
    return b["x"].mean(1)


def _out(m: Model, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    """A loss that is a mean over samples, of a tensor [samples, width]."""
    return F.cross_entropy(m.head(torch.tanh(h)), b["label"])


def _each(m: Model, b: dict[str, Tensor]) -> Tensor:
    """The loss of each position, [samples, positions]."""
    return (m.fc(b["x"]) - b["y"]).pow(2).mean(-1)


# ------------------------------------------------------------------------ samples alone


def plain(m: Model, b: Any) -> Tensor:
    return _out(m, torch.relu(m.fc(_rows(b))), b)


def mean_of_squares(m: Model, b: Any) -> Tensor:
    return F.mse_loss(m.fc(b["x"]), b["y"])


def sum_over_batch_size(m: Model, b: Any) -> Tensor:
    return _each(m, b).sum() / len(b["x"])


def sum_of_scaled(m: Model, b: Any) -> Tensor:
    return (_each(m, b) / (b["x"].shape[0] * LENGTH)).sum()


def batchmean_kl(m: Model, b: Any) -> Tensor:
    log_p = F.log_softmax(m.fc(b["x"]), -1)
    return F.kl_div(log_p, F.softmax(b["y"], -1), reduction="batchmean")


def two_losses(m: Model, b: Any) -> Tensor:
    return plain(m, b) + 0.3 * mean_of_squares(m, b) + 1e-3 * m.fc.weight.pow(2).sum()


def per_sample_softmax(m: Model, b: Any) -> Tensor:
    scores = torch.softmax(m.fc(b["x"]).sum(-1), dim=1)
    return _out(m, (b["x"] * scores.unsqueeze(-1)).sum(1), b)


def sequence_first(m: Model, b: Any) -> Tensor:
    x = b["x"].transpose(0, 1)
    x = m.norm(m.fc(x.reshape(-1, WIDTH))).view(LENGTH, -1, WIDTH)
    return _out(m, x.cumsum(0)[-1], b)


def attention(m: Model, b: Any) -> Tensor:
    q, k = m.fc(b["x"]), m.fc2(b["x"])
    return _out(m, F.scaled_dot_product_attention(q, k, k).mean(1), b)


def einsum_with_dots(m: Model, b: Any) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", m.fc(b["x"]), m.fc2(b["x"])).softmax(-1)
    return _out(m, torch.einsum("...qk,...kd->...qd", scores, b["x"]).mean(1), b)


def class_token(m: Model, b: Any) -> Tensor:
    x = torch.cat([m.start.expand(b["x"].shape[0], -1, -1), b["x"]], dim=1)
    return _out(m, m.conv(x.transpose(1, 2))[..., 0], b)


def repeated_positions(m: Model, b: Any) -> Tensor:
    places = torch.arange(LENGTH, device=b["x"].device).unsqueeze(0).repeat(len(b["x"]), 1)
    return _out(m, (m.table(places) + m.fc(b["x"])).mean(1), b)


def masked_fill_per_sample(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]) * b["mask"].unsqueeze(-1)
    return _out(m, x.sum(1) / b["mask"].sum(1, keepdim=True), b)


def last_position(m: Model, b: Any) -> Tensor:
    last = b["mask"].sum(1).long() - 1
    rows = torch.arange(len(b["x"]), device=b["x"].device)
    return _out(m, m.fc(b["x"])[rows, last], b)


def flat_last_position(m: Model, b: Any) -> Tensor:
    last = b["mask"].sum(1).long() - 1
    rows = torch.arange(len(b["x"]), device=b["x"].device) * LENGTH + last
    return _out(m, m.fc(b["x"]).flatten(0, 1)[rows], b)


def gathered(m: Model, b: Any) -> Tensor:
    logits = m.head(b["x"])
    return -torch.gather(logits.log_softmax(-1), 2, b["ids"].unsqueeze(-1)).mean()


def taken_along_row(m: Model, b: Any) -> Tensor:
    logits = m.head(b["x"]).log_softmax(-1)
    return -torch.take_along_dim(logits, b["ids"].unsqueeze(-1), 2).mean()


def member_of_classes(m: Model, b: Any) -> Tensor:
    is_known = torch.isin(b["ids"], torch.arange(2, device=b["ids"].device))
    return _out(m, (m.fc(b["x"]) * is_known.unsqueeze(-1)).mean(1), b)


def group_normed(m: Model, b: Any) -> Tensor:
    return _out(m, m.group_norm(m.conv(b["x"].transpose(1, 2))).mean(-1), b)


def recurrent(m: Model, b: Any) -> Tensor:
    return _out(m, m.lstm(b["x"])[0][:, -1], b)


def recurrent_sequence_first(m: Model, b: Any) -> Tensor:
    return _out(m, m.gru(b["x"].transpose(0, 1))[0][-1], b)


def bags(m: Model, b: Any) -> Tensor:
    return _out(m, m.bag(b["ids"]), b)


def sorted_in_sample(m: Model, b: Any) -> Tensor:
    values, _ = torch.sort(m.fc(b["x"]).sum(-1), dim=1)
    return values[:, 0].pow(2).mean() + values.topk(2, dim=1).values.mean()


def two_views(m: Model, b: Any) -> Tensor:
    z = torch.tanh(m.fc(torch.cat([_rows(b), b["y"].mean(1)])))
    first, two = z.chunk(2)
    return 1 - F.cosine_similarity(first, two, dim=-1).mean()


def two_views_by_number(m: Model, b: Any) -> Tensor:
    n = len(b["x"])
    z = torch.tanh(m.fc(torch.cat([_rows(b), b["y"].mean(1)])))
    return (z[:n] - z[n:]).abs().mean()


def sorted_by_expert(m: Model, b: Any) -> Tensor:
    """Tokens are put in order of their expert, computed on in runs, and put back."""
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    weights, chosen = m.gate(x).softmax(-1).topk(2, dim=-1)
    flat = chosen.reshape(-1)
    order = flat.argsort()
    counts = torch.histc(flat[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = counts.to(torch.int32).cumsum(0).to(torch.int32)
    rows = torch._grouped_mm(x[order // 2].bfloat16(), m.experts.bfloat16(), offs=ends)
    rows = rows.to(x.dtype) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return _out(m, rows[back].view(-1, 2, WIDTH).sum(1).view(-1, LENGTH, WIDTH).mean(1), b)


def sorted_and_added_back(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    order = b["ids"].reshape(-1).argsort()
    rows = torch.tanh(m.fc2(x[order]))
    return _out(m, torch.zeros_like(x).index_add(0, order, rows).view_as(b["x"]).mean(1), b)


def sorted_and_undone(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    order = b["ids"].reshape(-1).argsort()
    rows = torch.tanh(x[order])
    return (rows[order.argsort()] * x).mean()


def every_expert(m: Model, b: Any) -> Tensor:
    shares = m.gate(b["x"]).softmax(-1)
    outs = torch.einsum("bsi,eij->bsej", b["x"], m.experts)
    return _out(m, (outs * shares.unsqueeze(-1)).sum(2).mean(1), b)


def experts_by_weights(m: Model, b: Any) -> Tensor:
    chosen = m.gate(b["x"]).argmax(-1)
    return _out(m, torch.tanh((b["x"].unsqueeze(2) @ m.experts[chosen]).squeeze(2)).mean(1), b)


def ignored_labels(m: Model, b: Any) -> Tensor:
    return F.cross_entropy(m.head(b["x"]).view(-1, CLASSES), b["ids"].view(-1), ignore_index=-100)


def weighted_elements(m: Model, b: Any) -> Tensor:
    target = torch.zeros_like(m.head(_rows(b))).scatter(1, b["label"].unsqueeze(1), 1.0)
    return F.binary_cross_entropy_with_logits(m.head(_rows(b)), target, pos_weight=m.weight)


def smoothed_labels(m: Model, b: Any) -> Tensor:
    chances = F.one_hot(b["label"], CLASSES).to(b["x"].dtype) * 0.9 + 0.02
    return F.cross_entropy(m.head(_rows(b)), chances, weight=m.weight, label_smoothing=0.1)


def padded_attention(m: Model, b: Any) -> Tensor:
    q, k = m.fc(b["x"]), m.fc2(b["x"])
    scores = q @ k.transpose(1, 2) / WIDTH**0.5
    scores = scores.masked_fill(b["mask"].unsqueeze(1) == 0, float("-inf"))
    return _out(m, (scores.softmax(-1) @ k).mean(1), b)


def nearest_codes(m: Model, b: Any) -> Tensor:
    h = m.fc(b["x"]).flatten(0, 1)
    codes = m.table(torch.cdist(h, m.table.weight).argmin(-1))
    return F.mse_loss(codes, h.detach()) + 0.25 * F.mse_loss(h, codes.detach())


def heads_in_front(m: Model, b: Any) -> Tensor:
    q = m.fc(b["x"]).view(-1, LENGTH, 2, WIDTH // 2).permute(2, 0, 1, 3)
    scores = torch.bmm(q.flatten(0, 1), q.flatten(0, 1).transpose(1, 2)).softmax(-1)
    mixed = torch.bmm(scores, q.flatten(0, 1)).view(2, -1, LENGTH, WIDTH // 2)
    return _out(m, mixed.permute(1, 2, 0, 3).reshape(-1, LENGTH, WIDTH).mean(1), b)


def triplets(m: Model, b: Any) -> Tensor:
    anchor, other = m.fc(_rows(b)), m.fc2(b["y"].mean(1))
    return F.triplet_margin_loss(anchor, other, m.fc2(_rows(b))) + F.smooth_l1_loss(anchor, other)


def counter(m: Model, b: Any) -> Tensor:
    m.calls += 1
    return plain(m, b)


def power_iteration(m: Model, b: Any) -> Tensor:
    with torch.no_grad():
        m.direction.copy_(F.normalize(m.fc.weight @ m.direction, dim=0))
    return _out(m, m.fc(_rows(b)) * m.direction, b)


def average_of_weights(m: Model, b: Any) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(m.fc.bias, alpha=0.1)
    return _out(m, m.fc(_rows(b)) + m.average, b)


def warmed_up(m: Model, b: Any) -> Tensor:
    m.calls += 1
    share = (m.calls / 10).clamp(max=1).to(b["x"].dtype)
    return plain(m, b) + share * mean_of_squares(m, b)


def cooled_down(m: Model, b: Any) -> Tensor:
    m.average.mul_(0.5)
    return _out(m, m.fc(_rows(b)) / m.average, b)


def detached(m: Model, b: Any) -> Tensor:
    return plain(m, b) + 0 * b["x"].mean().detach()


def cast_as_larger(m: Model, b: Any) -> Tensor:
    """A tensor takes the dtype of others with more dims, with samples in any of them or none."""
    others = (b["x"], b["x"].transpose(0, 1), m.experts)
    return sum(
        (_out(m, m.fc(_rows(b)).type_as(other), b) for other in others), b["x"].new_zeros(())
    )


def dot_with_itself(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return torch.einsum("bi,bi->b", h, h).mean()


def mean_after_shift(m: Model, b: Any) -> Tensor:
    return (1.0 - _each(m, b).mean()) * 2 + 5


def frames(m: Model, b: Any) -> Tensor:
    x = b["x"].view(-1, 2, LENGTH // 2, WIDTH).permute(2, 0, 1, 3).reshape(-1, WIDTH)
    return torch.tanh(m.fc(x)).view(LENGTH // 2, -1, WIDTH).pow(2).mean()


# ------------------------------------------------------------------------ across samples


def where_sum(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, torch.where(h.sum() > 0, h, -2 * h), b)


def mean_in_model(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h + h.mean(0, keepdim=True), b)


def centred(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h - h.mean(0), b)


def top_of_batch(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).topk(2, dim=0).values.mean()


def softmax_over_batch(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h.softmax(dim=0), b)


def log_softmax_over_batch(m: Model, b: Any) -> Tensor:
    return -(m.fc(_rows(b)).log_softmax(dim=0) * b["y"].mean(1)).mean()


def root_of_mean(m: Model, b: Any) -> Tensor:
    return torch.sqrt(F.mse_loss(m.fc(b["x"]), b["y"]))


def log_of_mean(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean().log()


def masked_mean(m: Model, b: Any) -> Tensor:
    return (_each(m, b) * b["mask"]).sum() / b["mask"].sum()


def masked_mean_kept_from_zero(m: Model, b: Any) -> Tensor:
    return (_each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)


def masked_mean_with_epsilon(m: Model, b: Any) -> Tensor:
    return (_each(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-8)


def masked_shares(m: Model, b: Any) -> Tensor:
    return (_each(m, b) * b["mask"] / b["mask"].sum()).sum()


def class_weights(m: Model, b: Any) -> Tensor:
    return F.cross_entropy(m.head(_rows(b)), b["label"], weight=m.weight)


def sum_loss(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).sum()


def sum_cross_entropy(m: Model, b: Any) -> Tensor:
    return F.cross_entropy(m.head(_rows(b)), b["label"], reduction="sum")


def sum_and_penalty(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).sum() + m.fc.weight.pow(2).sum()


def times_batch_size(m: Model, b: Any) -> Tensor:
    return plain(m, b) * len(b["x"])


def mean_over_one_less(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).sum() / (len(b["x"]) - 1)


def class_centres(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    sums = torch.zeros(CLASSES, WIDTH, device=h.device).to(h.dtype).index_add(0, b["label"], h)
    return _out(m, h - 0.1 * sums[b["label"]], b)


def dispatched_by_product(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    shares = m.gate(x).softmax(-1)
    slots = torch.tanh(torch.einsum("te,td->ed", shares.softmax(0), x))
    return _out(m, torch.einsum("te,ed->td", shares, slots).view_as(b["x"]).mean(1), b)


def batch_laid_across(m: Model, b: Any) -> Tensor:
    """A reshape that a transpose was meant for."""
    x = m.fc(b["x"]).reshape(LENGTH, -1, WIDTH)
    return _out(m, x.tanh().mean(0), b)


def rows_by_label(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h + h[b["label"].clamp(max=0)], b)


def plus_batch_size(m: Model, b: Any) -> Tensor:
    return _out(m, m.fc(_rows(b)) + len(b["x"]), b)


def scaled_by_batch_size(m: Model, b: Any) -> Tensor:
    return _out(m, m.fc(_rows(b)) / len(b["x"]), b)


def variance_over_batch(m: Model, b: Any) -> Tensor:
    return m.fc(_rows(b)).var(0).mean()


def cumsum_over_tokens(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH).cumsum(0)
    return _out(m, x.view_as(b["x"]).mean(1), b)


def cumsum_as_product(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    before = torch.tril(torch.ones(len(h), len(h), device=h.device))
    return _out(m, before.to(h.dtype) @ h, b)


def expert_choice(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    scores, tokens = m.gate(x).softmax(-1).t().topk(x.shape[0] // 2, dim=1)
    rows = torch.bmm(x[tokens], m.experts) * scores.unsqueeze(-1)
    out = torch.zeros_like(x).index_add(0, tokens.reshape(-1), rows.reshape(-1, WIDTH))
    return _out(m, out.view_as(b["x"]).mean(1), b)


def capacity(m: Model, b: Any) -> Tensor:
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    shares = m.gate(x).softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), EXPERTS)
    place = chosen.cumsum(0) * chosen
    kept = ((place <= 2) & (chosen > 0)).to(x.dtype) * shares
    out = torch.einsum("te,ti,eij->tj", kept, x, m.experts)
    return _out(m, out.view_as(b["x"]).mean(1), b)


def balance_loss(m: Model, b: Any) -> Tensor:
    shares = m.gate(b["x"].reshape(-1, WIDTH)).softmax(-1)
    used = F.one_hot(shares.argmax(-1), EXPERTS).to(shares.dtype).mean(0)
    return plain(m, b) + 0.1 * EXPERTS * (used * shares.mean(0)).sum()


def balance_by_counts(m: Model, b: Any) -> Tensor:
    shares = m.gate(b["x"].reshape(-1, WIDTH)).softmax(-1)
    counts = torch.histc(shares.argmax(-1).float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    used = (counts / counts.sum()).to(shares.dtype)
    return plain(m, b) + 0.1 * EXPERTS * (used * shares.mean(0)).sum()


def contrast(m: Model, b: Any) -> Tensor:
    similar = m.fc(_rows(b)) @ m.fc2(b["y"].mean(1)).T
    return F.cross_entropy(similar, torch.arange(len(similar), device=similar.device))


def pairwise_distances(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return torch.tanh((h[:, None] - h[None]).pow(2)).mean()


def decorrelated(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return ((h.T @ h / len(h)) - torch.eye(WIDTH, device=h.device)).pow(2).mean()


def normalised_over_batch(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h / h.norm(dim=0, keepdim=True), b)


def largest_of_batch(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).max()


def median_of_batch(m: Model, b: Any) -> Tensor:
    return _each(m, b).mean(1).median()


def log_sum_exp(m: Model, b: Any) -> Tensor:
    return torch.logsumexp(_each(m, b).mean(1), dim=0)


def mixed_up(m: Model, b: Any) -> Tensor:
    other = torch.arange(len(b["x"]), device=b["x"].device).flip(0)
    h = 0.7 * _rows(b) + 0.3 * _rows(b)[other]
    return _out(m, m.fc(h), b)


def rolled(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h - h.roll(1, 0), b)


def neighbours(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return (h[1:] - h[:-1]).pow(2).mean()


def first_sample(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h + h[0], b)


def rows_by_frequency(m: Model, b: Any) -> Tensor:
    """The gradient of a row is divided by how often the batch looks it up."""
    rows = F.embedding(b["ids"], m.table.weight, scale_grad_by_freq=True)
    return _out(m, rows.mean(1), b)


def bags_by_frequency(m: Model, b: Any) -> Tensor:
    """The same of rows that are summed."""
    rows = F.embedding_bag(b["ids"], m.table.weight, mode="sum", scale_grad_by_freq=True)
    return _out(m, rows, b)


def bags_by_offsets(m: Model, b: Any) -> Tensor:
    """One list of numbers for all samples, and where each begins in it: here the last has all."""
    begins = 0 * b["label"]
    return _out(m, F.embedding_bag(b["ids"].flatten(), m.table.weight, begins), b)


def edges_of_batch(m: Model, b: Any) -> Tensor:
    """Messages between rows that numbers of the batch name, as `edge_index` does."""
    h = m.fc(_rows(b))
    source, target = b["ids"][:, 0].clamp(max=1), b["label"].clamp(max=1)
    return _out(m, torch.zeros_like(h).index_add(0, target, h[source]), b)


def reduced_by_number(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, torch.zeros_like(h).index_reduce(0, b["label"].clamp(max=1), h, "mean"), b)


def taken_by_number(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h * torch.take(h, b["label"].clamp(max=1)).unsqueeze(1), b)


def taken_along_batch(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h + torch.take_along_dim(h, b["label"].clamp(max=1).unsqueeze(1), 0), b)


def member_of_batch(m: Model, b: Any) -> Tensor:
    is_known = torch.isin(b["label"], b["ids"][:, 0])
    return _out(m, m.fc(_rows(b)) * is_known.unsqueeze(1), b)


def place_in_batch(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h * torch.arange(len(h), device=h.device).unsqueeze(1), b)


def sorted_and_not_undone(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return _out(m, h + h[b["label"].argsort()], b)


def convolved_over_batch(m: Model, b: Any) -> Tensor:
    return _out(m, m.conv(m.fc(_rows(b)).T).T, b)


def attention_over_batch(m: Model, b: Any) -> Tensor:
    q, k = m.fc(b["x"]).transpose(0, 1), m.fc2(b["x"]).transpose(0, 1)
    return _out(m, F.scaled_dot_product_attention(q, k, k).mean(0), b)


def batch_normed(m: Model, b: Any) -> Tensor:
    return _out(m, m.batch_norm(m.fc(_rows(b))), b)


def moving_average(m: Model, b: Any) -> Tensor:
    m.average.copy_(0.9 * m.average + 0.1 * b["x"].mean((0, 1)))
    return plain(m, b)


def filled_queue(m: Model, b: Any) -> Tensor:
    m.queue.copy_(torch.cat([m.queue, _rows(b)])[-7:])
    return plain(m, b)


def drawn_walk(m: Model, b: Any) -> Tensor:
    m.average.add_(torch.randn(WIDTH))
    return plain(m, b) + 0 * m.average.sum()


def samples_repeated(m: Model, b: Any) -> Tensor:
    """Each sample twice, behind itself, and each with what is its own."""
    twice = _rows(b).repeat_interleave(2, 0)
    return (m.fc(twice) - b["y"].mean(1).repeat_interleave(2, dim=0)).square().mean()


def number_chosen(m: Model, b: Any) -> Tensor:
    factor = torch.where(b["mask"].sum(1) > 2, 1, 3)
    return (m.fc(_rows(b)) * factor[:, None]).square().mean()


# --------------------------------------- alone in what they compute, and named all the same


def mean_added_to_each(m: Model, b: Any) -> Tensor:
    each = _each(m, b).mean(1)
    return (each + each.mean()).mean()


def centred_and_averaged(m: Model, b: Any) -> Tensor:
    h = m.fc(_rows(b))
    return (h - h.mean(0)).mean() + mean_of_squares(m, b)


def runs_by_lengths(m: Model, b: Any) -> Tensor:
    """Rows in runs, as long as numbers of the batch say: here all of one sample."""
    lengths = 0 * b["label"] + LENGTH
    return _out(m, torch.segment_reduce(m.fc(b["x"]).flatten(0, 1), "mean", lengths=lengths), b)


def running_counts_of_rows(m: Model, b: Any) -> Tensor:
    """Rows sorted by numbers counted up, not by a sort."""
    x = m.fc(b["x"]).reshape(-1, WIDTH)
    place = torch.ones_like(x[:, 0]).cumsum(0).long() - 1
    return _out(m, x[place].view_as(b["x"]).mean(1), b)


ALONE = (
    plain, mean_of_squares, sum_over_batch_size, sum_of_scaled, batchmean_kl, two_losses,
    per_sample_softmax, sequence_first, attention, einsum_with_dots, class_token,
    repeated_positions, masked_fill_per_sample, last_position, flat_last_position, gathered,
    taken_along_row, member_of_classes,
    group_normed, recurrent, recurrent_sequence_first, bags, sorted_in_sample, two_views,
    two_views_by_number, sorted_by_expert, sorted_and_added_back, sorted_and_undone,
    every_expert, experts_by_weights, ignored_labels, weighted_elements, smoothed_labels,
    padded_attention, nearest_codes, heads_in_front, triplets, counter, power_iteration,
    average_of_weights, warmed_up, cooled_down, detached, cast_as_larger,
    dot_with_itself,
    mean_after_shift, frames, samples_repeated, number_chosen,
)  # fmt: skip

ACROSS: dict[Body, tuple[str, ...]] = {
    where_sum: ("mixed",),
    mean_in_model: ("mixed",),
    centred: ("mixed",),
    top_of_batch: ("mixed",),
    softmax_over_batch: ("mixed",),
    log_softmax_over_batch: ("mixed",),
    root_of_mean: ("mixed",),
    log_of_mean: ("mixed",),
    class_weights: ("normaliser",),
    variance_over_batch: ("mixed",),
    cumsum_over_tokens: ("mixed",),
    cumsum_as_product: ("pairs",),
    expert_choice: ("mixed",),
    capacity: ("mixed",),
    balance_loss: ("mixed",),
    balance_by_counts: ("normaliser", "mixed"),
    contrast: ("pairs",),
    pairwise_distances: ("pairs",),
    decorrelated: ("mixed",),
    normalised_over_batch: ("mixed",),
    largest_of_batch: ("mixed",),
    median_of_batch: ("mixed",),
    log_sum_exp: ("mixed",),
    rolled: ("mixed",),
    neighbours: ("mixed",),
    first_sample: ("mixed",),
    class_centres: ("mixed",),
    dispatched_by_product: ("mixed",),
    batch_laid_across: ("mixed",),
    rows_by_label: ("mixed",),
    rows_by_frequency: ("mixed",),
    bags_by_frequency: ("mixed",),
    bags_by_offsets: ("mixed",),
    edges_of_batch: ("mixed",),
    reduced_by_number: ("mixed",),
    taken_by_number: ("mixed",),
    taken_along_batch: ("mixed",),
    sorted_and_not_undone: ("mixed",),
    convolved_over_batch: ("mixed",),
    attention_over_batch: ("mixed",),
    moving_average: ("buffer",),
    filled_queue: ("mixed", "buffer"),
    drawn_walk: ("repeated",),
}
"""Bodies that cutting the batch changes, and the kind of what is named."""

MADE_WHOLE: tuple[Body, ...] = (
    member_of_batch,
    masked_mean,
    masked_mean_kept_from_zero,
    masked_mean_with_epsilon,
    masked_shares,
    sum_loss,
    sum_cross_entropy,
    sum_and_penalty,
    times_batch_size,
    mean_over_one_less,
    plus_batch_size,
    scaled_by_batch_size,
    mixed_up,
    place_in_batch,
)
"""Bodies that the mean of the parts' losses changes, and which parts compute as the whole does."""

NAMED_ALL_THE_SAME = {
    mean_added_to_each: "a mean that is added to each sample is not followed further",
    centred_and_averaged: "that a later mean takes the subtracted one out is arithmetic",
    runs_by_lengths: "lengths that come with the batch may be any",
    running_counts_of_rows: "numbers counted up are values, whatever they are used for",
}
"""Bodies that cutting leaves as they are, and why they are named."""

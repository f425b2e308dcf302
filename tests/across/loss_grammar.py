"""What people write into losses, as templates: a grammar for `random_losses`.

`{name}` stands for a tensor of the batch, a value of the model (`MODEL`), a part of the module
(`{self.head}`) or for one of the alternatives here (`RULES`), which is written on a line of its own
and is the same wherever its name stands in a term. Where a loss is not in the module,
alternatives with a part of it are left out.
"""

from __future__ import annotations

Alternatives = dict[str, str]
"""Templates by the names by which programs are sorted."""

PARTS = {
    "token": "nn.Embedding(TOKENS, WIDTH)",
    "trunk": "nn.Linear(WIDTH, WIDTH)",
    "head": "nn.Linear(WIDTH, CLASSES)",
    "tagger": "nn.Linear(WIDTH, CLASSES)",
    "value": "nn.Linear(WIDTH, 1)",
    "s": "nn.Parameter(torch.tensor([0.3, -0.2]))",
    "codes": "nn.Parameter(torch.randn(3, WIDTH))",
    "classy": "nn.Parameter(torch.randn(CLASSES))",
    "rarity": "torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])",
    "heat": "torch.tensor(0.8)",
    "ctc_mean": 'Ctc("mean")',
    "ctc_sum": 'Ctc("sum")',
    "ctc_none": 'Ctc("none")',
    "chosen": "Chosen()",
}
BUFFERS = {"rarity", "heat"}

MODEL = {
    "logits": "{self.head}({h})",  # [samples, tokens, classes]
    "tagged": "{self.tagger}({h})",
    "values": "{self.value}({h}).squeeze(-1)",  # [samples, tokens]
    "pooled": "{self.head}({h}.mean(1))",  # [samples, classes]
    "s": "{self.s}",
    "codes": "{self.codes}",
    "rarity": "{self.rarity}",
    "heat": "{self.heat}",
}
TRUNKS = {"by token": "torch.tanh({self.token}({ids}))", "by x": "torch.tanh({self.trunk}({x}))"}

TARGETS: Alternatives = {  # labels for every token
    "own argmax": "{logits}.detach().argmax(-1)",
    "clamped labels": "{labels}.clamp(min=0)",
    "threshold labels": "({target} > 0.2).long()",
    "drawn labels": "torch.randint(2, 3, {labels}.shape)",
    "nearest code": "({h}.unsqueeze(-2) - {codes}).square().sum(-1).detach().argmin(-1)",
}

MASKS: Alternatives = {
    "mask": "{mask}",
    "labels that count": "{labels} != -100",
    "labels >= 0": "({labels} >= 0).double()",
    "tags": "{tags}.ne(0)",
    "keep": "{keep}",
    "threshold": "{target} > 0.2",
    "lengths": "torch.arange({mask}.shape[1]) < {lengths}[:, None]",
    "bernoulli": "torch.bernoulli({mask})",
    "drawn and kept": "(torch.rand_like({mask}) < 2) & {keep}",
    "own hits": "{logits}.detach().argmax(-1) == {labels}",
    "own confidence": "{values}.detach() > 0",
    "weighted mask": "{mask} * {weights}[:, None]",
    "shifted mask": "({mask}.cumsum(1) > 1).double()",
    "finite": "torch.isfinite({gaps})",
    "class weights": "{rarity}[{tags}] * {keep}",
    "first of the batch": "({mask}.cumsum(0) <= 2).double() * mask",
    "known classes": "(({classes} != -100)[:, None] & {keep})",
}

ADVANTAGES: Alternatives = {
    "plain advantage": "{rewards}[:, None]",
    "whitened": "(({rewards} - rewards.mean()) / (rewards.std() + 1e-6))[:, None]",
    "centred": "({rewards} - rewards.mean())[:, None]",
    "scaled to one": "({rewards} / rewards.abs().max())[:, None]",
    "whitened without bias": "(({rewards} - rewards.mean()) "
    "* rewards.var(correction=0).add(1e-8).rsqrt())[:, None]",
    "ranked": "({rewards}.argsort().argsort().double() / {size})[:, None]",
    "above the median": "({rewards} > rewards.median()).double()[:, None]",
}

TOKEN_LOSSES: Alternatives = {  # [samples, tokens]
    "ce none": 'F.cross_entropy({logits}.transpose(1, 2), {labels}, reduction="none"{options})',
    "ce none flat": "F.cross_entropy({logits}.flatten(0, 1), {labels}.flatten(), "
    'reduction="none"{options}).view_as(labels)',
    "ce tags": 'F.cross_entropy({tagged}.mT, {tags}, ignore_index=0, reduction="none")',
    "gathered": "-{logits}.log_softmax(-1).gather(-1, {labels}.clamp(min=0)[..., None])[..., 0]",
    "ce of made labels": 'F.cross_entropy({logits}.mT, {y}, reduction="none")',
    "squares": "({values} - {target}) ** 2",
    "mse none": 'F.mse_loss({values}, {target}, reduction="none")',
    "l1 none": 'F.l1_loss({values}, {target}, reduction="none")',
    "huber none": 'F.huber_loss({values}, {target}, reduction="none", delta=0.5)',
    "smooth l1 none": 'F.smooth_l1_loss({values}, {target}, reduction="none")',
    "bce none": "F.binary_cross_entropy_with_logits("
    '{values}, ({target} > 0).double(), reduction="none")',
    "kl none": "F.kl_div({logits}.log_softmax(-1), F.pad({x}, (0, 1)).softmax(-1), "
    'reduction="none").sum(-1)',
    "entropy": "-({logits}.softmax(-1) * logits.log_softmax(-1)).sum(-1)",
    "z": "{logits}.logsumexp(-1).square()",
    "pinball": "torch.maximum(0.9 * ({target} - {values}), 0.1 * (values - target))",
    "nan-filled squares": "({values} - {gaps}.nan_to_num()) ** 2",
    "policy": "-({values} - {old}).exp() * {advantage}",
    "clipped policy": "-torch.min({ratio} * {advantage}, {ratio}.clamp(0.8, 1.2) * {advantage})",
}
FOCAL = "(1 - (-{0}).exp()) ** 2 * {0}"

SAMPLE_LOSSES: Alternatives = {  # [samples]
    "ce of samples": 'F.cross_entropy({pooled}, {classes}.clamp(min=0), reduction="none")',
    "ce of some samples": 'F.cross_entropy({pooled}, {classes}, reduction="none")',
    "tokens of sample meant": "{l}.mean(1)",
    "tokens of sample summed": "{l}.sum(1)",
    "masked mean of sample": "({l} * {m}).sum(1) / {m}.sum(1).clamp(min=1)",
    "multi margin none": 'F.multi_margin_loss({pooled}, {classes}.clamp(min=0), reduction="none")',
    "ctc none": "{self.ctc_none}({logits}.log_softmax(-1).transpose(0, 1), "
    "{tags}.clamp(min=1)[:, :2], {lengths}.clamp(max=2))",
    "cosine none": "F.cosine_embedding_loss("
    '{h}.mean(1), {x}.mean(1), {rewards}.sign(), reduction="none")',
    "reinforce": "-{advantage}.squeeze(1) * {values}.mean(1)",
}

KEPT: Alternatives = {
    "multiplied": "{l} * {m}",
    "where": "torch.where({m} > 0, {l}, torch.zeros_like({l}))",
    "where 0": "torch.where({m} > 0, {l}, 0.0)",
    "filled": "{l}.masked_fill(~({m} > 0), 0.0)",
}

BALANCED: Alternatives = {
    "balanced": "(1 / torch.bincount({classes}.clamp(min=0), minlength=CLASSES).clamp(min=1))"
    "[classes.clamp(min=0)]",
}

RULES: dict[str, tuple[str, Alternatives]] = {
    "l": ("l", TOKEN_LOSSES),
    "e": ("e", SAMPLE_LOSSES),
    "m": ("m", MASKS),
    "other": ("m", MASKS),
    "k": ("k", KEPT),
    "y": ("y", TARGETS),
    "advantage": ("a", ADVANTAGES),
    "ratio": ("r", {"": "(-F.softplus({values}) - {old}).exp()"}),
    "balance": ("b", BALANCED),
}
"""By name: how its variables begin, and what it may be."""

OF_TOKENS: Alternatives = {
    "mean": "{l}.mean()",
    "sum": "{l}.sum()",
    "sum / constant": "{l}.sum() / 10.0",
    "sum / num_items": "{l}.sum() / {num_items}",
    "sum / len": "{l}.sum() / {size}",
    "sum / (len - 1)": "{l}.sum() / ({size} - 1)",
    "sum / numel": "{l}.sum() / {l}.numel()",
    "mean * len": "{l}.mean() * {size}",
    "sum(1).mean()": "{l}.sum(1).mean()",
    "mean(0).sum()": "{l}.mean(0).sum()",
    "mean(1).sum()": "{l}.mean(1).sum()",
    "mean(-1).mean(0)": "{l}.mean(-1).mean(0)",
    "nanmean": '{l}.masked_fill({labels} < 0, float("nan")).nanmean()',
    "nansum / count": '{l}.masked_fill(~{keep}, float("nan")).nansum() / keep.sum()',
    "last tokens": "{l}[:, -1].mean()",
    "by index": "{l}[torch.arange({size}), {lengths} - 1].mean()",
    "root": "{l}.square().mean().sqrt()",
    "norm": "({l} + 0.01).norm()",
    "amax": "{l}.max()",
    "logsumexp": "{l}.flatten().logsumexp(0)",
    "median": "{l}.median()",
    "top": "{l}.flatten().topk(3).values.mean()",
    "top of each": "{l}.topk(2, 1).values.mean()",
    "weighted by softmax": "({l} * {l}.detach().softmax(1)).sum(1).mean()",
    "trimmed": "{l}.clamp(max=1.0).mean()",
    "mean keepdim": "{l}.mean((0, 1), keepdim=True).squeeze()",
    "mean of first samples": "{l}[:2].mean()",
    "sequence first": "{l}.transpose(0, 1).reshape(-1).mean()",
}

MASKED: Alternatives = {
    "/ count": "{k}.sum() / {m}.sum()",
    "/ count clamped": "{k}.sum() / {m}.sum().clamp(min=1)",
    "/ count + eps": "{k}.sum() / ({m}.sum() + 1e-6)",
    "/ max(count, 1)": "{k}.sum() / torch.clamp({m}.double().sum(), min=1.0)",
    "/ another count": "{k}.sum() / {other}.sum().clamp(min=1)",
    "/ count ** 2": "{k}.sum() / ({m}.sum() ** 2)",
    "/ root of count": "{k}.sum() / {m}.double().sum().sqrt()",
    "/ nonzero": "{k}.sum() / ({k} != 0).sum().clamp(min=1)",
    "/ num_items": "{k}.sum() / {num_items}",
    "mean * numel / count": "{k}.mean() * {m}.numel() / {m}.sum()",
    "mean / mean": "{k}.mean() / {m}.double().mean()",
    "mean / (mean + eps)": "{k}.mean() / ({m}.double().mean() + 1e-3)",
    "mean of all": "{k}.mean()",
    "by place": "({k}.sum(0) / {m}.sum(0).clamp(min=1)).mean()",
    "by sample": "({k}.sum(1) / {m}.sum(1).clamp(min=1)).mean()",
    "by samples that have any": "({k}.sum(1) / {m}.sum(1).clamp(min=1)).sum() / "
    "({m} > 0).any(1).sum()",
    "normalised first": "({k} * (1 / {m}.sum())).sum()",
    "mask / count": "({l} * ({m} / {m}.sum())).sum()",
    "mask / mean": "({l} * ({m} / {m}.double().mean())).mean()",
    "positives and negatives": "{k}.sum() / {m}.sum().clamp(min=1) + "
    "0.5 * ({l} * (1 - {m}.double())).sum() / (1 - {m}.double()).sum().clamp(min=1)",
    "dice": "1 - 2 * (torch.sigmoid({l}) * {m}).sum() / "
    "(torch.sigmoid({l}).sum() + {m}.sum() + 1.0)",
    "einsum": 'torch.einsum("bt,bt->", {l}, {m}.double()) / {m}.sum()',
    "learned share": "{k}.sum() / (torch.sigmoid({l}) * {m}).sum()",
    "balanced by own size": "({k} / {k}.detach().mean().clamp(min=1e-3)).mean()",
    "chosen": "{self.chosen}({l}, {m} > 0)",
    "indexed": "{l}[{m} > 0].mean()",
    "/ count in place": "{k}.sum().div_({m}.sum())",
    "* reciprocal": "{k}.sum() * {m}.double().sum().reciprocal()",
    "* count ** -1": "{k}.sum() * {m}.double().sum().pow(-1)",
    "/ detached count": "torch.div({k}.sum(), {m}.sum().detach())",
    "where any": "torch.where({m}.sum() > 0, {k}.sum() / {m}.sum().clamp(min=1), {k}.sum() * 0)",
    "count by matmul": "{k}.sum() / ({m}.double() @ torch.ones(LENGTH).double()).sum()",
    "sums of samples": "{k}.sum(1).sum() / {m}.sum(1).sum()",
    "/ greatest count": "({k}.sum(1) / {m}.sum(1).max()).mean()",
    "by samples, weighted by count": "(({k}.sum(1) / {m}.sum(1).clamp(min=1)) "
    "* {m}.sum(1)).sum() / {m}.sum()",
    "two counts": "{k}.sum() / ({m}.sum() + {other}.sum())",
    "logged": "({k}.sum() / {m}.sum()) + 0 * {l}.detach().mean()",
}

WEIGHTED: Alternatives = {
    "mean of samples": "{e}.mean()",
    "sum of samples": "{e}.sum()",
    "weights / sum": "({e} * ({weights} / weights.sum())).sum()",
    "sum / sum of weights": "({e} * {weights}).sum() / weights.sum()",
    "weights / mean": "({e} * {weights} / weights.mean()).mean()",
    "weights / max": "({e} * {weights} / weights.max()).mean()",
    "softmax of weights": "({e} * {weights}.softmax(0)).sum()",
    "len * softmax": "({e} * {weights}.log().softmax(0)).mean() * {size}",
    "plain weights": "({e} * {weights}).mean()",
    "dot": "torch.dot({e}, {weights}) / weights.sum()",
    "matmul": "{e} @ {weights} / weights.sum()",
    "class balanced sum": "({e} * {balance}).sum()",
    "class balanced mean": "({e} * {balance}).sum() / {balance}.sum()",
    "own weights / sum": "({e} * {e}.detach()).sum() / {e}.detach().sum()",
    "own softmax": "({e} * {e}.detach().softmax(0)).sum()",
    "hard examples": "{e}.topk(2).values.mean()",
    "sorted": "{e}.sort().values[-3:].mean()",
    "below the mean": "({e} * ({e} < {e}.mean())).mean()",
    "whitened loss": "(({e} - {e}.mean().detach()) / ({e}.std().detach() + 1e-3) "
    "* {values}.mean(1)).mean()",
    "min-snr": "({e} * {weights}.clamp(max=1.0) / weights).mean()",
    "of a class": "({e} * ({classes} == 1)).sum() / (classes == 1).sum().clamp(min=1)",
    "variance": "{e}.mean() + 0.1 * {e}.var()",
    "normalize": "({e} * F.normalize({weights}, p=1, dim=0)).sum()",
    "/ norm": "({e} * {weights} / weights.norm()).sum()",
    "by number": "({e} * torch.arange({size})).mean()",
    "next sample": "({e}[1:] - {e}[:-1]).square().mean()",
    "first and last": "{e}[0] + {e}[-1]",
    "reversed": "({e} * {weights}.flip(0)).mean()",
    "of ranks": "({e} * ({weights}.argsort().argsort() > 1)).mean()",
    "sum of squares of weights": "({e} * {weights}).sum() / weights.square().sum().sqrt()",
}

BUILT_IN: Alternatives = {
    "ce": "F.cross_entropy({logits}.flatten(0, 1), {labels}.flatten(){options})",
    "ce transposed": "F.cross_entropy({logits}.transpose(1, 2), {labels}{options})",
    "ce shifted": "F.cross_entropy({logits}[:, :-1].flatten(0, 1), {labels}[:, 1:].flatten())",
    "ce module": "nn.CrossEntropyLoss(ignore_index=0)({tagged}.flatten(0, 1), {tags}.flatten())",
    "ce sum": 'F.cross_entropy({logits}.mT, {labels}, reduction="sum")',
    "ce sum / num_items": 'F.cross_entropy({logits}.mT, {labels}, reduction="sum") / {num_items}',
    "ce sum / count": 'F.cross_entropy({logits}.mT, {labels}, reduction="sum") / '
    "(labels != -100).sum().clamp(min=1)",
    "ce of samples mean": "F.cross_entropy({pooled}, {classes}{options})",
    "ce made labels": "F.cross_entropy({logits}.mT, {y})",
    "ce pseudo labels": "F.cross_entropy({logits}.mT, "
    "torch.where({values}.detach() > 0, {logits}.detach().argmax(-1), -100))",
    "ce masked labels": "F.cross_entropy({logits}.mT, {labels}.masked_fill({mask} == 0, -100))",
    "ce drawn labels": "F.cross_entropy({logits}.flatten(0, 1), "
    "torch.where(torch.rand_like({mask}) < 2, {labels}, -100).flatten())",
    "ce of probabilities": "F.cross_entropy({logits}.flatten(0, 1), "
    "F.pad({x}, (0, 1)).softmax(-1).flatten(0, 1))",
    "ce of probabilities weighted": "F.cross_entropy({logits}.flatten(0, 1), "
    "F.pad({x}, (0, 1)).softmax(-1).flatten(0, 1), weight={rarity})",
    "ce sequence first": "F.cross_entropy("
    "{logits}.transpose(0, 1).flatten(0, 1), {labels}.t().flatten())",
    "ce in chunks": 'sum(F.cross_entropy(a.mT, b, reduction="sum") for a, b in '
    "zip({logits}.split(2, 1), {labels}.split(2, 1))) / (labels != -100).sum()",
    "ce learned weights": "F.cross_entropy("
    "{logits}.mT, {labels}, weight={self.classy}.detach().exp())",
    "ce of two views": "F.cross_entropy(torch.cat([{logits}, -logits]).mT, "
    "torch.cat([{labels}, labels]))",
    "nll": "F.nll_loss({logits}.log_softmax(-1).mT, {labels})",
    "nll weighted": "F.nll_loss({logits}.log_softmax(-1).mT, {labels}, weight={rarity})",
    "mse": "F.mse_loss({values}, {target})",
    "mse sum": 'F.mse_loss({values}, {target}, reduction="sum")',
    "l1": "F.l1_loss({values}, {target})",
    "huber": "F.huber_loss({values}, {target})",
    "smooth l1": "nn.SmoothL1Loss()({values}, {target})",
    "bce": "F.binary_cross_entropy_with_logits({values}, ({target} > 0).double())",
    "bce weight": "F.binary_cross_entropy_with_logits({values}, {mask}, weight={weights}[:, None])",
    "bce pos_weight of batch": "F.binary_cross_entropy_with_logits("
    "{values}, {mask}, pos_weight=(1 - mask).sum() / mask.sum())",
    "kl batchmean": "F.kl_div({pooled}.log_softmax(-1), "
    'F.pad({x}.mean(1), (0, 1)).softmax(-1), reduction="batchmean")',
    "ctc": "{self.ctc_mean}({logits}.log_softmax(-1).transpose(0, 1), "
    "{tags}.clamp(min=1)[:, :2], {lengths}.clamp(max=2))",
    "ctc sum": "{self.ctc_sum}({logits}.log_softmax(-1).transpose(0, 1), "
    "{tags}.clamp(min=1)[:, :2], {lengths}.clamp(max=2))",
    "cosine": "F.cosine_embedding_loss({h}.mean(1), {x}.mean(1), {rewards}.sign())",
    "margin ranking": "F.margin_ranking_loss("
    "{values}[:, 0], {values}[:, 1], {rewards}.sign(), margin=0.2)",
    "hinge embedding": "F.hinge_embedding_loss({values}, {target}.sign())",
    "multi margin": "F.multi_margin_loss({pooled}, {classes}.clamp(min=0))",
    "multi margin weighted": "F.multi_margin_loss("
    "{pooled}, {classes}.clamp(min=0), weight={rarity})",
    "triplet": "F.triplet_margin_loss({h}[:, 0], {h}[:, 1], {h}[:, 2])",
    "poisson nll": "F.poisson_nll_loss({values}, {target}.abs())",
    "soft margin": "F.soft_margin_loss({values}, {target}.sign())",
    "multilabel": "F.multilabel_soft_margin_loss("
    "{pooled}, F.one_hot({classes}.clamp(min=0), CLASSES).double())",
    "router balance": "CLASSES * ({logits}.softmax(-1).mean((0, 1)) "
    "* F.one_hot(logits.argmax(-1), CLASSES).double().mean((0, 1))).sum()",
    "balance of samples": "({logits}.softmax(-1).mean(1) "
    "* F.one_hot(logits.argmax(-1), CLASSES).double().mean(1)).sum(-1).mean()",
    "clip": "F.cross_entropy({h}.mean(1) @ {x}.mean(1).T, torch.arange({size}))",
    "variance of features": "F.relu(1 - {h}.mean(1).var(0)).mean()",
}
"""Losses that torch has, and of routers and features."""

CHANGED: Alternatives = {  # what is done with a number, `t0`
    "meaned": "{t0}.mean()",
    "summed": "{t0}.sum()",
    "clamp": "{t0}.clamp(max=100.0)",
    "clamp near": "{t0}.clamp(min=0.3, max=1.2)",
    "nan_to_num": "torch.nan_to_num({t0})",
    "where finite": "torch.where(torch.isfinite({t0}), {t0}, torch.zeros_like({t0}))",
    "double": "{t0}.double()",
    "power": "({t0}.abs() + 0.1) ** 1.5",
    "square": "{t0} ** 2",
    "root of": "({t0}.abs() + 0.1).sqrt()",
    "log of": "({t0}.abs() + 0.1).log()",
    "exp of": "(0.3 * {t0}).exp()",
    "focal of mean": FOCAL.format("{t0}"),
    "* scale": "{t0} * {scale}",
    "* heat": "{heat} * {t0}",
    "learned": "(-{s}[0]).exp() * {t0} + s[0]",
    "learned sigma": "{t0} / (2 * {s}[0] ** 2) + torch.log(1 + s[0] ** 2)",
    "index": "{t0}[None][0]",
    "viewed": "{t0}.view(1).squeeze()",
    "expanded": "{t0}.expand(3).mean()",
    "repeated": "{t0}.unsqueeze(0).repeat(2).sum()",
    "/ detached": "{t0} / ({t0}.detach().abs() + 0.1)",
    "* detached": "{t0} * {t0}.detach()",
    "* mean of batch": "{t0} * {weights}.mean()",
    "* len": "{t0} * {size}",
    "/ len": "{t0} / {size}",
    "* items": "{t0} * {num_items} / 7",
    "/ items": "{t0} / {num_items}",
    "* count": "{t0} * ({labels} != -100).sum() / 10",
    "flooded": "({t0} - 0.9).abs() + 0.9",
    "at least": "torch.clamp({t0}, min=0.01)",
    "negated": "-(-{t0})",
    "affine": "0.5 * {t0} + 1.0",
    "1 - a": "1 - {t0}",
    "/ 3": "{t0} / 3",
    "tanh": "torch.tanh({t0})",
    "if mean of batch": "torch.where({rewards}.mean() > 0, {t0}, 2 * {t0})",
    "zero where none": "torch.where(({labels} != -100).any(), {t0}, 0.0)",
}

PENALTIES: Alternatives = {  # added to `t0`
    "weight decay": "{t0} + 0.01 * {self.head}.weight.square().sum()",
    "norm of weights": "{t0} + 0.1 * {self.head}.weight.norm()",
    "all parameters": "{t0} + 1e-3 * sum(p.square().sum() for p in self.parameters())",
    "l1 of bias": "{t0} + 0.01 * {self.head}.bias.abs().sum()",
    "log of scales": "{t0} + {self.s}.square().sum()",
    "mean activation": "{t0} + 0.1 * {h}.square().mean()",
    "sum of activations": "{t0} + 0.01 * {h}.square().sum()",
}

JOINED: Alternatives = {  # of several numbers, `t0`, `t1`; `terms` are all, with commas
    "added": "{t0} + {t1}",
    "added with weights": "0.3 * {t0} + 1.3 * {t1}",
    "stack mean": "torch.stack([{terms}]).mean()",
    "stack sum": "torch.stack([{terms}]).sum()",
    "sum of list": "sum([{terms}]) / 2",
    "dict": "sum(dict(ce={t0}, other={t1}).values())",
    "cat": "torch.cat([{t0}.reshape(1), {t1}.reshape(1)]).mean()",
    "learned shares": "(torch.stack([{t0}, {t1}]) * {s}.softmax(0)).sum()",
    "learned weights": "((-{s}).exp() * torch.stack([{t0}, {t1}]) + s).sum()",
    "product": "{t0} * {t1}",
    "ratio": "{t0} / ({t1}.abs() + 0.5)",
    "difference": "{t0} - 0.2 * {t1}",
    "greatest of two": "torch.maximum({t0}, {t1})",
    "logsumexp of terms": "torch.logsumexp(torch.stack([{terms}]), 0)",
    "balanced by detached": "{t0} + {t1} * ({t0}.detach() / ({t1}.detach().abs() + 0.1))",
    "straight through": "{t0} + ({t1} - {t0}).detach()",
    "lerp": "torch.lerp({t0}, {t1}, {scale})",
    "stack of samples": "torch.stack([{terms}]).view(-1, 1).mean(0).sum()",
}
LINEAR = {
    name: JOINED[name]
    for name in ("added", "added with weights", "stack mean", "stack sum", "sum of list", "dict")
}

SUMS: Alternatives = {  # for which "sum" is right
    "sum of tokens": "{l}.sum()",
    "sum / constant": "{l}.sum() / 10.0",
    "sum / num_items": "{l}.sum() / {num_items}",
    "masked sum": "({l} * {m}).sum()",
    "weighted sum": "({e} * {weights}).sum()",
    "ce sum": BUILT_IN["ce sum"],
    "ce sum / num_items": BUILT_IN["ce sum / num_items"],
    "mse sum": BUILT_IN["mse sum"],
    "ctc sum": BUILT_IN["ctc sum"],
    "mean * len": "{l}.mean() * {size}",
}

COUNTED = {  # a mean, and what counts in a part
    "counts labels": (
        "F.cross_entropy({logits}.flatten(0, 1), {labels}.flatten())",
        'planner.count_tokens("labels")(part)',
    ),
    "counts the mask": ("({l} * {mask}).sum() / mask.sum()", 'float(part["mask"].sum())'),
    "counts the mask, clamped": (
        "({l} * {mask}).sum() / mask.sum().clamp(min=1)",
        'float(part["mask"].sum())',
    ),
    "counts weights": (
        "({e} * {weights}).sum() / weights.sum()",
        'float(part["weights"].sum())',
    ),
    "counts kept": (
        "torch.where({keep}, {l}, 0.0).sum() / keep.sum()",
        'float(part["keep"].sum())',
    ),
}

MAY_COINCIDE = {
    *("clamp", "nan_to_num", "where finite", "at least", "trimmed", "greatest of two"),
    *("/ count clamped", "/ max(count, 1)", "/ count + eps", "mean / (mean + eps)"),
    *(
        "clamp near",
        "flooded",
        "/ another count",
        "positives and negatives",
        "balanced by own size",
        "zero where none",
    ),
}
"""By which parts can differ from the whole on other batches than those that are tried."""

NAMED_ALL_THE_SAME = {
    # Modules of their own that are called as they are: what they give has no samples, or along
    # another dim than what they are given.
    *("ctc", "ctc sum", "ctc none"),
    "lerp",  # between two losses: linear in both, and has no rule that says so
    "nanmean",  # numbers that count are told from others by their values
    "drawn labels",  # how many count is drawn: here as many in each part
}
"""Of which it is known that they are named in vain."""

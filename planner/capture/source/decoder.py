"""A template's model as a module: what its graph describes, to capture, prove and train.

In: the sizes of a `Transformer` of `modules` code. Out: an nn.Module whose capture is the graph
that `build_transformer` makes, op for op (`tests/templates/test_decoder.py`); experts alone are
written as torch has them, as a grouped product of sorted rows, where the graph has single calls of
a library of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import PlannerError
from planner.language.templates.transformer import Experts, Latent, Transformer

DROPOUT = 0.1
"""Part of entries that is dropped out, as in the graph."""

INITIAL_STD = 0.02
"""Standard deviation of random weights (GPT-2, Radford et al. 2019)."""

ROTARY_BASE = 10000.0
"""Of the rates at which pairs of entries turn (Su et al. 2021, arXiv 2104.09864, section 3.3)."""


class Decoder(nn.Module):
    """A decoder that returns the mean loss of its next tokens.

    Its batches are ``input_ids`` and ``labels`` of (samples, seq_len), the labels already shifted.
    Raises PlannerError for a model that no module is written for.
    """

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        if sizes.sees_all or sizes.transforms_head or sizes.encoder:
            raise PlannerError(
                "a module is written for decoders alone; build_transformer has the graphs of "
                "encoders, and `planner check` prices them"
            )
        if sizes.code != "modules" or sizes.adapters:
            raise PlannerError(
                "a module is written for code='modules' without adapters; build_transformer has "
                "the others' graphs"
            )
        self.sizes = sizes
        dense_first = sizes.experts.dense_layers if sizes.experts else 0
        self.embedding = _Embedding(sizes)
        self.rotary = _Rotary(sizes) if sizes.positions == "rotary" else None
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    _Layer(sizes, is_dense=sizes.experts is None or index < dense_first)
                    for index in range(sizes.layers + sizes.ahead)
                )
            }
        )
        self.final_layernorm = _norm(sizes, sizes.hidden)
        self.ahead = nn.ModuleList(_Ahead(sizes) for _ in range(sizes.ahead))
        self.output_layer = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=INITIAL_STD)
        if sizes.tied:
            self.output_layer.weight = self.embedding.word_embeddings.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of `labels`, both of (samples, seq_len)."""
        positions = torch.arange(self.sizes.seq_len, device=input_ids.device)[None]
        x = self.embedding(input_ids, positions)
        turned = () if self.rotary is None else self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, *turned)
        loss = self._loss(self.final_layernorm(x), labels)
        for ahead in self.ahead:
            loss = loss + self._loss(ahead(x), labels)
        return loss

    @property
    def layers(self) -> Iterator[nn.Module]:
        """The layers, in order."""
        return self.decoder["layers"].children()

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output_layer(x)
        return F.cross_entropy(logits.view(-1, self.sizes.vocab).float(), labels.reshape(-1))


class _Embedding(nn.Module):
    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocab, sizes.hidden)
        self.position_embeddings = None
        if sizes.positions == "learned":
            rows = sizes.max_positions or sizes.seq_len
            self.position_embeddings = nn.Embedding(rows, sizes.hidden)
        self.dropout = nn.Dropout(DROPOUT) if sizes.dropout else nn.Identity()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return self.dropout(x)


class _Rotary(nn.Module):
    """Cosines and sines of the angles by which pairs of a head's entries turn."""

    inv_freq: Tensor

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        width = sizes.latent.rope_dim if sizes.latent else sizes.head_width
        rates = ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("inv_freq", rates, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn a head's halves against each other; `x` is (samples, positions, heads, width)."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    crossed = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + crossed * sin


class _Layer(nn.Module):
    def __init__(self, sizes: Transformer, *, is_dense: bool) -> None:
        super().__init__()
        self.input_layernorm = _norm(sizes, sizes.hidden)
        self.self_attention = (
            _LatentAttention(sizes, sizes.latent) if sizes.latent else _Attention(sizes)
        )
        self.pre_mlp_layernorm = _norm(sizes, sizes.hidden)
        if is_dense or sizes.experts is None:
            self.mlp: nn.Module = _FeedForward(sizes, sizes.ffn_hidden)
        else:
            self.mlp = _Experts(sizes, sizes.experts)
        self.dropout = nn.Dropout(DROPOUT) if sizes.dropout else nn.Identity()

    def forward(self, x: Tensor, *turned: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), *turned))
        return x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))


class _Attention(nn.Module):
    """Causal attention; queries, keys and values are one product, dealt by head of keys."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.head_width
        columns = (sizes.heads + 2 * sizes.kv_heads) * width
        self.qkv = nn.Linear(sizes.hidden, columns, bias=sizes.bias)
        self.q_layernorm = _norm(sizes, width) if sizes.query_key_norm else nn.Identity()
        self.k_layernorm = _norm(sizes, width) if sizes.query_key_norm else nn.Identity()
        self.proj = nn.Linear(sizes.heads * width, sizes.hidden, bias=False)

    def forward(self, x: Tensor, *turned: Tensor) -> Tensor:
        samples, positions, _ = x.shape
        width, shared = self.sizes.head_width, self.sizes.heads // self.sizes.kv_heads
        joined = self.qkv(x).view(samples, positions, -1, (shared + 2) * width)
        query, key, value = joined.split((shared * width, width, width), dim=-1)
        query = query.reshape(samples, positions, -1, width)
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if turned:
            query, key = (_turned(each, *turned) for each in (query, key))
        return self.proj(_attended(self.sizes, query, key, value))


class _LatentAttention(nn.Module):
    """Heads made from narrow vectors; a part of each query's and key's head turns."""

    def __init__(self, sizes: Transformer, latent: Latent) -> None:
        super().__init__()
        self.sizes, self.latent = sizes, latent
        wide, turn = sizes.heads * sizes.head_width, latent.rope_dim
        if latent.query_rank:
            self.q_down = nn.Linear(sizes.hidden, latent.query_rank, bias=False)
            self.q_layernorm = _norm(sizes, latent.query_rank)
        self.q_up = nn.Linear(
            latent.query_rank or sizes.hidden, wide + sizes.heads * turn, bias=False
        )
        self.kv_down = nn.Linear(sizes.hidden, latent.key_rank + turn, bias=False)
        self.kv_layernorm = _norm(sizes, latent.key_rank)
        self.kv_up = nn.Linear(latent.key_rank, 2 * wide, bias=False)
        self.proj = nn.Linear(wide, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        samples, positions, _ = x.shape
        plain, turn, heads = self.sizes.head_width, self.latent.rope_dim, self.sizes.heads
        source = self.q_layernorm(self.q_down(x)) if self.latent.query_rank else x
        query = self.q_up(source).view(samples, positions, -1, plain + turn)
        narrow, key_turn = self.kv_down(x).split((self.latent.key_rank, turn), dim=-1)
        wide = self.kv_up(self.kv_layernorm(narrow)).view(samples, positions, -1, 2 * plain)
        key_still, value = wide.split((plain, plain), dim=-1)
        still, moved = query.split((plain, turn), dim=-1)
        query = torch.cat((still, _turned(moved, cos, sin)), dim=-1)
        key_turn = _turned(key_turn.unsqueeze(2), cos, sin)
        key_turn = key_turn.expand(samples, positions, heads, turn)
        key = torch.cat((key_still, key_turn), dim=-1)
        return self.proj(_attended(self.sizes, query, key, value))


def _attended(sizes: Transformer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of (samples, positions, heads, width), its heads side by side."""
    samples, positions = query.shape[:2]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    if sizes.fused_attention:
        dropout = DROPOUT if sizes.dropout else 0.0
        made = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=shared > 1
        )
    else:
        if shared > 1:
            key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
        ahead = torch.ones(positions, positions, dtype=torch.bool, device=query.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
        if sizes.dropout:
            weights = F.dropout(weights, DROPOUT)
        made = weights @ value
    return made.transpose(1, 2).contiguous().view(samples, positions, -1)


class _FeedForward(nn.Module):
    """Two products; with `gated` the first makes a gate and what it multiplies."""

    def __init__(self, sizes: Transformer, width: int) -> None:
        super().__init__()
        self.gated = sizes.gated
        self.fc1 = nn.Linear(sizes.hidden, (2 if sizes.gated else 1) * width, bias=sizes.bias)
        self.fc2 = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(_activated(self.fc1(x), gated=self.gated))


def _activated(x: Tensor, *, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Experts(nn.Module):
    """Rows in the order of their experts, multiplied run by run, and summed by their weights."""

    def __init__(self, sizes: Transformer, experts: Experts) -> None:
        super().__init__()
        self.sizes, self.experts = sizes, experts
        number, width = experts.number, experts.width
        self.router = nn.Linear(sizes.hidden, number, bias=False)
        joined = (2 if sizes.gated else 1) * width
        self.fc1 = nn.Parameter(torch.empty(number, sizes.hidden, joined))
        self.fc2 = nn.Parameter(torch.empty(number, width, sizes.hidden))
        for weight in (self.fc1, self.fc2):
            nn.init.normal_(weight, std=INITIAL_STD)
        self.fc1_bias = nn.Parameter(torch.zeros(number, joined)) if experts.bias else None
        self.fc2_bias = nn.Parameter(torch.zeros(number, sizes.hidden)) if experts.bias else None
        shared = experts.width_of_shared
        self.shared_experts = _FeedForward(sizes, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, self.sizes.hidden)
        scores = self.router(rows).float().softmax(dim=-1)
        weights, chosen = scores.topk(self.experts.per_token, dim=-1)
        ordered, order = chosen.view(-1).sort()
        # What is not differentiable: how many rows each expert has, and where its run ends.
        counts = torch.histc(
            ordered.int().float(), self.experts.number, min=0, max=self.experts.number - 1
        )
        ends = counts.int().cumsum(0, dtype=torch.int32)
        sorted_rows = rows[order // self.experts.per_token]
        made = torch._grouped_mm(sorted_rows, self.fc1, offs=ends)
        if self.fc1_bias is not None:
            made = made + self.fc1_bias[ordered]
        made = _activated(made, gated=self.sizes.gated)
        made = torch._grouped_mm(made, self.fc2, offs=ends)
        if self.fc2_bias is not None:
            made = made + self.fc2_bias[ordered]
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
        made = made[places].view(-1, self.experts.per_token, self.sizes.hidden)
        made = (made * weights.to(made.dtype).unsqueeze(-1)).sum(dim=1).view(x.shape)
        return made if self.shared_experts is None else made + self.shared_experts(x)


class _Ahead(nn.Module):
    """The stream joined with a token's embedding, for a token that is predicted further ahead."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.stream, self.token = (_norm(sizes, sizes.hidden) for _ in range(2))
        self.proj = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.norm = _norm(sizes, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(torch.cat((self.stream(x), self.token(x)), dim=-1)))


def _norm(sizes: Transformer, width: int) -> nn.Module:
    if sizes.norm == "rms":
        return nn.RMSNorm(width, eps=sizes.epsilon)
    return nn.LayerNorm(width, eps=sizes.epsilon)

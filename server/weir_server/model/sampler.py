"""From logits to tokens.

Rows are first edited one by one (penalties, bias, minimum length), which leaves rows that ask for nothing untouched; then
rows with equal (temperature, top-k, top-p, min-p) are drawn in one extraction, [rows, vocab] → [rows], without a loop over
them. Every operation works along a row, so a row's token is the same alone and in company. Random numbers are a hash of
(seed, choice, position): no state, no neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weir_server.link.messages import LOWEST_LOGPROB, Sampling, TokenLogprobs

COLDEST = 1e-5
"""Temperatures below are greedy: divided by one that float32 cannot hold, the best token's own weight is no number."""

NOT_FINITE = "the model's logits are not finite"

_CUTS = (256, 4096)
"""Candidates looked at before the whole vocabulary is sorted for top-p; the first is almost always enough."""


@dataclass(slots=True)
class Draw:
    """One row that samples. `context`: all its tokens so far, of which the first `prompt_len` are the user's."""

    sampling: Sampling
    choice: int
    context: Sequence[int]
    prompt_len: int


@dataclass(slots=True)
class Drawn:
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sample(logits: torch.Tensor, rows: Sequence[Draw]) -> list[Drawn]:
    """Draw a token for each row of `logits` float32 [rows, vocab], which is edited in place. A row that fails says so."""
    out = [Drawn() for _ in rows]
    groups: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    raw: dict[int, torch.Tensor] = {}
    numbers = logits.numpy()  # its reductions are vectorised, and wake no other thread for one row: see 152
    finite = (np.isfinite(numbers.max(-1)) & np.isfinite(numbers.min(-1))).tolist()
    for i, row in enumerate(rows):
        s = row.sampling
        if not finite[i]:
            out[i].error = NOT_FINITE
            continue
        if s.logprobs >= 0:
            raw[i] = logits[i : i + 1].clone()
        try:
            _edit(logits[i], row)
        except (IndexError, RuntimeError) as e:
            out[i].error = f"sampling failed: {e}"
            continue
        groups[_GREEDY if s.temperature < COLDEST else (s.temperature, s.top_k, s.top_p, s.min_p)].append(i)
    for parameters, members in groups.items():
        chosen = logits if len(members) == len(rows) else logits[members]
        if parameters is _GREEDY:
            tokens: list[int | None] = list(chosen.numpy().argmax(-1).tolist())
        else:
            drawn = [uniform(r.sampling.seed, r.choice, len(r.context)) for r in (rows[i] for i in members)]
            tokens = _extract(chosen, *parameters, torch.tensor(drawn, dtype=torch.float64))
        for i, token in zip(members, tokens, strict=True):
            out[i].token = token
            if token is None:
                out[i].error = "sampling failed: no token is allowed"
            elif i in raw:
                (out[i].logprobs,) = logprobs_of(raw[i], [token], rows[i].sampling.logprobs)
    return out


_GREEDY = (0.0, 0, 1.0, 0.0)


def _edit(logits: torch.Tensor, row: Draw) -> None:
    """Penalties, bias and minimum length on one row [vocab], in place."""
    s = row.sampling
    if s.repetition_penalty != 1.0:  # over prompt and answer, as in transformers (CTRL, arXiv 1909.05858)
        seen = torch.tensor(sorted(set(row.context)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    generated = row.context[row.prompt_len :]
    if generated and (s.presence_penalty or s.frequency_penalty):  # over the answer alone, as in OpenAI's API
        counts = Counter(generated)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        logits[torch.tensor(list(counts))] -= s.presence_penalty + s.frequency_penalty * times
    if s.logit_bias:
        logits[torch.tensor(list(s.logit_bias))] += torch.tensor(list(s.logit_bias.values()), dtype=logits.dtype)
    if s.stop_ids and len(generated) < s.min_tokens:
        logits[torch.tensor(s.stop_ids)] = -torch.inf


def _extract(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, numbers: torch.Tensor
) -> list[int | None]:
    """Tokens by inverse transform in the vocabulary's order: temperature, then top-k, top-p, min-p, as in transformers.

    A filter is a least weight: weights are relative to the best token's 1, and what ties with the least is kept.
    """
    weights, best = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp_(), None
    if 0 < top_k < weights.shape[-1]:
        best = weights.topk(top_k).values
        weights = _at_least(weights, best[:, -1:])
    if top_p < 1.0:
        weights = _at_least(weights, _nucleus(weights, top_p, best))
    if min_p > 0.0:
        weights = _at_least(weights, torch.tensor(min_p))
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, numbers[:, None] * total)[:, 0].tolist()
    return [token if ok else None for token, ok in zip(tokens, (total[:, 0] > 0).tolist(), strict=True)]


def _at_least(weights: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return weights.masked_fill(weights < least, 0.0)


def _nucleus(weights: torch.Tensor, top_p: float, best: torch.Tensor | None) -> torch.Tensor:
    """The least weight [rows, 1] in the smallest set of best tokens whose share reaches `top_p` (arXiv 1904.09751).

    `best`: the weights that there are, in order, where another filter has sorted them (of its last, others may tie). Totals
    are the ends of running sums: unlike a sum, those add in the same order however many rows there are.
    """
    wanted, vocab = top_p * weights.cumsum(-1, dtype=torch.float64)[:, -1:], weights.shape[-1]
    cuts = [cut for cut in (*_CUTS, vocab) if cut <= vocab] if best is None else [best.shape[-1]]
    for cut in cuts:
        sorted_ = weights.topk(cut).values if best is None else best
        short = (sorted_.cumsum(-1, dtype=torch.float64) < wanted).sum(-1, keepdim=True)
        if int(short.max()) < cut:
            break
    return sorted_.gather(-1, short.clamp(max=cut - 1))


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Of one token for each row of `logits` [rows, vocab], and of the k best: the model's own distribution, before
    temperature and edits."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(k, logprobs.shape[-1]))
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].clamp(min=LOWEST_LOGPROB).tolist()
    values = best.values.clamp(min=LOWEST_LOGPROB).tolist()
    return [
        TokenLogprobs(value, list(zip(ids, of_best, strict=True)))
        for value, ids, of_best in zip(chosen, best.indices.tolist(), values, strict=True)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in (0, 1) from a hash of its arguments: splitmix64 over the three words (Steele et al., OOPSLA 2014)."""
    mask, state = (1 << 64) - 1, 0
    for word in (seed, choice, position):
        state = (state ^ (word & mask)) + 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return ((state >> 11) + 0.5) / (1 << 53)

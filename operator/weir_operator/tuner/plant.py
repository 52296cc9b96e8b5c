"""The plant: step seconds = a + b·rows + c·context + p·prefill tokens, learned from the sums that the server keeps.

Least squares with coefficients ≥ 0 (exact: the best of the 15 subsets), each tick's sums counting 0.9 of the next one's.
What the server measured of itself at boot joins as a few made-up steps that are never forgotten: where the traffic does not
tell two coefficients apart (a full batch always has the same rows), they decide, and elsewhere they weigh nothing.
Cost: 15 systems of at most four equations, about 0.2 ms. Source of the form: docs/tuning-law.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

from weir_server.contract import STEP_PRODUCTS, STEP_SUMS, Plant

FORGET = 0.9
PRIOR_STEPS = 4.0
"""How many real steps each made-up one weighs."""
PRIOR_POINTS = ((1, 0, 0.0), (8, 0, 0.0), (8, 4096, 0.0), (1, 0, 1.0), (8, 1024, 1.0))
"""(rows, context tokens, share of the prefill tokens of a step): the steps that a server times at boot."""


def forget(sums: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, float]:
    """The sums after one more tick."""
    return {k: FORGET * sums.get(k, 0.0) + fresh[k] for k in (*STEP_SUMS, *STEP_PRODUCTS)}


def fit(sums: Mapping[str, float], prior: Plant | None) -> Plant | None:
    """The plant that explains `sums` best, or the prior alone, or None where there is neither."""
    if not sums.get("steps"):
        return prior
    matrix, vector = normal_equations(sums, prior)
    scale = [math.sqrt(matrix[i][i]) or 1.0 for i in range(4)]
    best, best_gain = None, 0.0
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            system = [[matrix[i][j] / scale[i] / scale[j] + (1e-9 if i == j else 0.0) for j in chosen] for i in chosen]
            right = [vector[i] / scale[i] for i in chosen]
            x = solve(system, right)
            gain = sum(r * v for r, v in zip(right, x, strict=True)) if x and min(x) >= 0 else 0.0
            if x and gain > best_gain:  # gain = how much of Σy² is explained
                best_gain, best = gain, {i: v / scale[i] for i, v in zip(chosen, x, strict=True)}
    if best is None:
        return prior
    a, b, c, p = (best.get(i, 0.0) for i in range(4))
    return Plant(a, b, c, p, prior.prefill_tokens if prior else _chunk(sums))


def _chunk(sums: Mapping[str, float]) -> int:
    """Without a boot measurement: no step is known to take more prefill tokens than Σp² ÷ Σp, the mean of those that did."""
    return max(1, round(sums["pp"] / sums["prefill_tokens"])) if sums.get("prefill_tokens") else 1


def normal_equations(sums: Mapping[str, float], prior: Plant | None) -> tuple[list[list[float]], list[float]]:
    s = sums
    n, c, p = s["decode_rows"], s["context_tokens"], s["prefill_tokens"]
    matrix = [
        [s["steps"], n, c, p],
        [n, s["nn"], s["nc"], s["np"]],
        [c, s["nc"], s["cc"], s["cp"]],
        [p, s["np"], s["cp"], s["pp"]],
    ]
    vector = [s["step_seconds"], s["ny"], s["cy"], s["py"]]
    if prior is not None and (expected := mean_step(prior, s)) > 0:
        level = s["step_seconds"] / s["steps"] / expected
        for rows, context, share in PRIOR_POINTS:
            x = (1.0, rows, context, share * prior.prefill_tokens)
            y = level * prior.step_seconds(*x[1:])
            for i in range(4):
                vector[i] += PRIOR_STEPS * x[i] * y
                for j in range(4):
                    matrix[i][j] += PRIOR_STEPS * x[i] * x[j]
    return matrix, vector


def solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivoting; None where the system is singular."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    size = len(rows)
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        if abs(rows[pivot][k]) < 1e-12:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [v - factor * w for v, w in zip(rows[i], rows[k], strict=True)]
    x = [0.0] * size
    for k in reversed(range(size)):
        x[k] = (rows[k][size] - sum(rows[k][j] * x[j] for j in range(k + 1, size))) / rows[k][k]
    return x


def mean_step(plant: Plant, sums: Mapping[str, float]) -> float:
    """What the plant expects of the mean step of `sums` (seconds)."""
    steps = sums["steps"]
    return plant.step_seconds(sums["decode_rows"] / steps, sums["context_tokens"] / steps, sums["prefill_tokens"] / steps)

"""Arithmetic of a run, pure: who is measured when, medians and pairs, claims against the fastest rival, shares of roofs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weir_bench.results import spread
from weir_bench.roofs import Roofs
from weir_bench.serving.record import Cell, Claim, Server, Share, Spread

T = TypeVar("T")
FASTER_IS_LESS = {"tokens_per_second": False, "itl_p50": True, "ttft_p50": True}
"""The figures that claims are made of."""


def turns(rounds: int, loads: Sequence[int], servers: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(round, load, server) in order: for each load all servers one after the other, so that neighbours make a pair."""
    for round in range(rounds):
        for load in loads:
            for server in servers:
                yield round, load, server


def of(values: Iterable[float]) -> Spread:
    return Spread(**spread(list(values)))


def series(cells: Iterable[Cell], server: str, clients: int, figure: str, output: int) -> dict[int, float]:
    """The figure by round, where the cell has it."""
    found = {c.round: getattr(c, figure) for c in cells if (c.server, c.clients, c.output) == (server, clients, output)}
    return {round: value for round, value in found.items() if value is not None}


def pairs(ours: dict[int, float], theirs: dict[int, float], less: bool) -> list[float]:
    """How many times ours is as fast, round by round; a round that one of them lacks makes no pair."""
    both = sorted(ours.keys() & theirs.keys())
    return [theirs[n] / ours[n] if less else ours[n] / theirs[n] for n in both]


def claims(cells: Sequence[Cell], servers: Sequence[Server], clients: Sequence[int], output: int) -> list[Claim]:
    """For each precision, number of clients, rival system and figure: ours against the form of the rival that is fastest
    in it. A system is one rival however many forms of it ran."""
    made = []
    for own in (s for s in servers if s.system == "weir"):
        systems = dict.fromkeys(s.system for s in servers if s.system != "weir" and s.precision == own.precision)
        for system in systems:
            forms = [s.name for s in servers if (s.system, s.precision) == (system, own.precision)]
            for n in clients:
                for figure, less in FASTER_IS_LESS.items():
                    if claim := _claim(cells, own, forms, n, figure, less, output):
                        made.append(claim)
    return made


def _claim(
    cells: Sequence[Cell], own: Server, forms: Sequence[str], n: int, figure: str, less: bool, output: int,
) -> Claim | None:
    ours = series(cells, own.name, n, figure, output)
    theirs = {form: found for form in forms if (found := series(cells, form, n, figure, output))}
    if not ours or not theirs:
        return None
    fastest = (min if less else max)(theirs, key=lambda form: of(theirs[form].values()).median)
    ratios = pairs(ours, theirs[fastest], less)
    return Claim(
        figure, own.precision, n, fastest, of(ratios), of(ours.values()), of(theirs[fastest].values())
    ) if ratios else None  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model's shape says of its cost. `layers_parameters`, `head_parameters`: weights of linears."""

    layers_parameters: int
    head_parameters: int
    layers: int
    heads_width: int
    """heads × head_dim"""
    kv_width: int
    """kv heads × head_dim"""

    @property
    def parameters(self) -> int:
        return self.layers_parameters + self.head_parameters

    def kv_token_bytes(self, element: int) -> float:
        """Of K and V of one token in all layers; `element`: bytes of a number."""
        return 2.0 * self.layers * self.kv_width * element

    def attention_flops(self, context: float) -> float:
        """Of one token that attends to `context` others."""
        return 4.0 * self.layers * self.heads_width * context

    def decode_flops(self, context: float) -> float:
        return 2.0 * self.parameters + self.attention_flops(context)

    def step(self, rows: int, context: float, weights_bytes: float, kv_token_bytes: float) -> tuple[float, float]:
        """Least bytes read and operations of a step of decode alone: the weights once, each row's KV, and each row."""
        return weights_bytes + rows * context * kv_token_bytes, rows * self.decode_flops(context)

    def prefill_flops(self, prompt: int) -> float:
        """Of a whole prompt; the head reads its last token alone."""
        return prompt * (2.0 * self.layers_parameters + self.attention_flops((prompt + 1) / 2)) + 2.0 * self.head_parameters


ALL_DECODE = 0.9
"""Rows a pass for each client, from which on a step is taken for one of decode alone."""


def decode_shares(cell: Cell, server: Server, shape: Shape) -> list[Share]:
    """A step of `clients` rows takes one ITL p50: it reads the weights once and each row's KV (read roof), and computes each
    row (fma roof). Which of the two limits depends on the rows; both are said. None where no roof was measured beside it, and
    none where many a pass had fewer rows: its steps carry prompts as well, and an ITL is not a step of decode."""
    if not cell.itl_p50 or cell.forward_rows < ALL_DECODE * cell.clients:
        return []
    read, flops = shape.step(cell.clients, cell.prompt + cell.output / 2, server.weights_bytes, server.kv_token_bytes)
    return [
        Share(server.name, "decode", cell.clients, roof, rate / top, flops / cell.itl_p50, flops / read)
        for roof, rate, top in (
            ("read", read / cell.itl_p50, cell.read_roof), ("fma", flops / cell.itl_p50, cell.fma_roof),
        )
        if top
    ]  # fmt: skip


def whole_share(cell: Cell, server: Server, shape: Shape) -> list[Share]:
    """All operations of a cell, of prompts and of tokens, over its whole time; none where no roof was measured beside it."""
    if not cell.fma_roof:
        return []
    each = shape.prefill_flops(cell.prompt) + cell.output * shape.decode_flops(cell.prompt + cell.output / 2)
    flops = cell.requests * each / cell.seconds
    return [Share(server.name, "everything", cell.clients, "fma", flops / cell.fma_roof, flops, 0.0)]


def prefill_share(cell: Cell, server: Server, shape: Shape, roofs: Roofs) -> Share | None:
    """Of a cell whose requests generate one token: all its time is prefill."""
    if roofs.gemm is None:
        return None
    flops = cell.requests * shape.prefill_flops(cell.prompt) / cell.seconds
    intensity = cell.requests * shape.prefill_flops(cell.prompt) / server.weights_bytes
    return Share(server.name, "prefill", cell.clients, "gemm", flops / roofs.gemm, flops, intensity)


def median_shares(cells: Sequence[Cell], server: Server, shape: Shape) -> list[Share]:
    """Of each roof the (lower) median of what cells of one kind reached, each under the roof that was measured beside it."""
    each = [share for c in cells for share in (*decode_shares(c, server, shape), *whole_share(c, server, shape))]
    kinds = [[s for s in each if (s.phase, s.roof) == kind] for kind in dict.fromkeys((s.phase, s.roof) for s in each)]
    return [_median(kind, lambda s: s.share) for kind in kinds]


def median_cell(cells: Sequence[Cell], server: str, clients: int, output: int, figure: str) -> Cell | None:
    """The cell whose figure is the (lower) median of its kind."""
    kind = [c for c in cells if (c.server, c.clients, c.output) == (server, clients, output) and getattr(c, figure) is not None]
    return _median(kind, lambda c: float(getattr(c, figure))) if kind else None


def _median(kind: Sequence[T], value: Callable[[T], float]) -> T:
    """The lower one."""
    return sorted(kind, key=value)[(len(kind) - 1) // 2]

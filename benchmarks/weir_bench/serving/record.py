"""What a run leaves behind: the shapes of its raw JSON. `results.write` adds machine, versions and date."""

from __future__ import annotations

from typing import Any

import msgspec

from weir_bench.roofs import Roofs

PROMPT, OUTPUT = 128, 64
"""Tokens of a request where a table does not say otherwise."""


class Spread(msgspec.Struct, frozen=True):
    """Of `n` values: their median, the least and the most."""

    median: float
    least: float
    most: float
    n: int


class Server(msgspec.Struct, frozen=True):
    """A contender as it ran. `isa`: instruction sets of its kernels; `weights_bytes`: what one token reads of them."""

    name: str
    system: str
    precision: str
    command: list[str]
    version: str
    isa: list[str]
    weights_bytes: float
    kv_token_bytes: float
    idle_cpu: float = 0.0


class Cell(msgspec.Struct, frozen=True):
    """One server under one load, once. Seconds, tokens a second over the wall time of all (prefill included).

    forward_rows: tokens generated for each forward pass, by the server's counters; events: events for each token, 1 where each
    token came alone; generator_*: the load generator's own lag and share of a core; server_cpu: cores that the server used;
    *_roof: what the machine gave beside it, the better of just before and just after (147).
    """

    server: str
    round: int
    clients: int
    requests: int
    prompt: int
    output: int
    seconds: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float | None
    itl_p95: float | None
    tpot_p50: float | None
    forward_rows: float
    events: float
    generator_lag_p99: float
    generator_cpu: float
    server_cpu: float
    read_roof: float | None = None
    fma_roof: float | None = None


class Claim(msgspec.Struct, frozen=True):
    """Ours against the fastest of a rival's forms in one figure at one number of clients: above 1 ours is faster. `ratio` is
    taken pair by pair; `ours`, `theirs`: the figure itself."""

    figure: str
    precision: str
    clients: int
    rival: str
    ratio: Spread
    ours: Spread
    theirs: Spread


class Share(msgspec.Struct, frozen=True):
    """How much of a roof was reached. `phase`: decode, prefill or everything; `roof`: read, fma or gemm; `intensity`:
    operations for each byte read, 0 of everything: its phases differ."""

    server: str
    phase: str
    clients: int
    roof: str
    share: float
    flops_per_second: float
    intensity: float


class Document(msgspec.Struct, frozen=True):
    """The raw JSON of a table of contenders."""

    benchmark: str
    date: str
    machine: dict[str, Any]
    form: str
    work: dict[str, Any]
    skipped: list[str]
    roofs: Roofs | None
    roofs_measured: list[Roofs]
    servers: list[Server]
    cells: list[Cell]
    claims: list[Claim]
    shares: list[Share]
    figures: dict[str, Any]

"""What docs/benchmarks.md and the README say about speed, from the raw JSON of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weir_bench.results import table
from weir_bench.serving import figures
from weir_bench.serving.record import Claim, Document, Spread

Data = Mapping[str, Any]
FIGURES = {"tokens_per_second": "tokens a second", "itl_p50": "between tokens, p50", "ttft_p50": "first token, p50"}


def side_by_side(d: Data) -> list[str]:
    doc = msgspec.convert(d, Document)
    return [
        *told(doc), "", "Figures are medians over the rounds, with the least and the most; times in ms.", "",
        *by_server(doc), "", *claims(doc), *shares(doc), "", f"![{doc.benchmark}](../benchmarks/results/{doc.benchmark}.png)",
    ]  # fmt: skip


def told(doc: Document) -> list[str]:
    """How the figures came about."""
    rounds = rounds_of(doc)
    lag, cpu = max(c.generator_lag_p99 for c in doc.cells), max(c.generator_cpu for c in doc.cells)
    lines = [
        f"{doc.work['prompt']} tokens in, {doc.work['output']} out, greedy, ignore_eos, no prefix cache, streams; "
        f"{counted(rounds, 'round')}, servers in turn. Load generator: p99 lag at most {lag * 1e3:.1f} ms, at most "
        f"{cpu:.0%} of a core. " + "; ".join(f"{s.name}: kernels {', '.join(s.isa) or 'not told'}" for s in doc.servers) + "."
    ]  # fmt: skip
    return lines + [f"Skipped: {why}." for why in doc.skipped]


def by_server(doc: Document) -> list[str]:
    head, rows = ("server", "clients", "tokens/s", "ITL p50", "ITL p95", "TTFT p50", "rows a pass"), []
    for server in doc.servers:
        for n in doc.work["clients"]:
            of = {
                name: figures.of(values.values())
                for name in ("tokens_per_second", "itl_p50", "itl_p95", "ttft_p50", "forward_rows")
                if (values := figures.series(doc.cells, server.name, n, name, doc.work["output"]))
            }
            if of:
                rows.append((
                    server.name, n, ranged(of["tokens_per_second"], 1, 1), ranged(of["itl_p50"], 1e3, 1),
                    ranged(of["itl_p95"], 1e3, 1), ranged(of["ttft_p50"], 1e3, 0), f"{of['forward_rows'].median:.1f}",
                ))  # fmt: skip
    return table(head, rows)


def claims(doc: Document) -> list[str]:
    if not doc.claims:
        return ["No rival ran, so nothing is claimed."]
    rows = []
    for rival in dict.fromkeys(c.rival.split(",")[0] for c in doc.claims):
        for n in doc.work["clients"]:
            of = {c.figure: c for c in doc.claims if c.clients == n and c.rival.split(",")[0] == rival}
            rows.append((rival, n, *(against(of.get(figure)) for figure in FIGURES)))
    return [
        "Ours against the faster form of each rival, pair by pair; above 1 ours is faster:", "",
        *table(("rival", "clients", *FIGURES.values()), rows),
    ]  # fmt: skip


def against(claim: Claim | None) -> str:
    if claim is None:
        return "–"
    form = claim.rival.partition(", ")[2]
    return f"{ranged(claim.ratio, 1, 2)} ×" + (f" ({form})" if form else "")


def shares(doc: Document) -> list[str]:
    if doc.roofs is None:
        return ["", "No roofs were measured."]
    servers = [s.name for s in doc.servers]
    kinds = dict.fromkeys((s.phase, s.clients, s.roof) for s in doc.shares)
    value = {(s.server, s.phase, s.clients, s.roof): s.share for s in doc.shares}
    rows = [
        (f"{phase}, {counted(n, 'client')}, of the {roof} roof",
         *(f"{value[s, phase, n, roof]:.0%}" if (s, phase, n, roof) in value else "–" for s in servers))
        for phase, n, roof in kinds
    ]  # fmt: skip
    gemm = f", best matrix product {doc.roofs.gemm / 1e9:.0f} Gflop/s" if doc.roofs.gemm else ""
    return [
        "", f"Roofs in the same run, {doc.roofs.threads} threads: read {doc.roofs.read / 1e9:.1f} GB/s, multiply-add "
        f"{doc.roofs.fma / 1e9:.0f} Gflop/s{gemm}. Reached:", "", *table(("share", *servers), rows),
    ]  # fmt: skip


def ranged(s: Spread | Data, scale: float, digits: int) -> str:
    """median (least–most), times `scale`; the spread is left out where there was one value."""
    of = s if isinstance(s, Spread) else msgspec.convert(s, Spread)
    median, least, most = (f"{v * scale:.{digits}f}" for v in (of.median, of.least, of.most))
    return f"{median} ({least}–{most})" if of.n > 1 else median


def rounds_of(doc: Document) -> int:
    return 1 + max((c.round for c in doc.cells), default=-1)


def counted(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def waves(d: Data) -> list[str]:
    head = ("server", "clients", "ITL p50, ms", "ITL p95, ms", "p95 / p50", "TTFT p50, ms")
    return table(head, [
        (name, n, ranged(c["itl_p50"], 1e3, 1), ranged(c["itl_p95"], 1e3, 1), ranged(c["ratio"], 1, 2),
         ranged(c["ttft_p50"], 1e3, 0))
        for name, of in d["figures"].items() for n, c in of.items()
    ])  # fmt: skip


def poisson(d: Data) -> list[str]:
    head = ("prefill chunk", "ITL p50, ms", "ITL p95, ms", "p95 / p50", "TTFT p50, ms", "TTFT p95, ms")
    rows = [
        (size, ranged(c["itl_p50"], 1e3, 1), ranged(c["itl_p95"], 1e3, 1), ranged(c["ratio"], 1, 2),
         ranged(c["ttft_p50"], 1e3, 0), ranged(c["ttft_p95"], 1e3, 0))
        for size, c in d["figures"].items()
    ]  # fmt: skip
    return [
        f"{d['work']['rate']:.2f} requests a second, {d['work']['load']:.0%} of what the server carries when none waits.",
        "", *table(head, rows), "", f"![chunks](../benchmarks/results/{d['benchmark']}.png)",
    ]  # fmt: skip


def start(d: Data) -> list[str]:
    head = ("server", "ready, s", "first token, s")
    return table(head, [(n, ranged(c["ready"], 1, 2), ranged(c["first_token"], 1, 2)) for n, c in d["figures"].items()])


def replay(d: Data) -> list[str]:
    w = d["work"]
    head = ("trace", "load", "server", "goodput", "good a second", "TTFT p95, s", "TPOT p95, ms", "refused")
    rows = [
        (c["trace"], f"{c['load']:.0%}", c["server"], f"{c['goodput']:.0%} of {c['requests']}", f"{c['good_per_second']:.2f}",
         "–" if c["ttft_p95"] is None else f"{c['ttft_p95']:.2f}",
         "–" if c["tpot_p95"] is None else f"{c['tpot_p95'] * 1e3:.0f}", c["refused"])
        for c in d["figures"]["cells"]
    ]  # fmt: skip
    return [
        f"{w['source']}; lengths scaled down. Objectives: first token {w['objectives']['ttft']:g} s, "
        f"{w['objectives']['tpot'] * 1e3:.0f} ms a token; each load for {w['seconds']:g} s.", "", *table(head, rows),
    ]  # fmt: skip


SECTIONS = {
    "serving-float32": side_by_side, "serving-int8": side_by_side, "serving-waves": waves, "serving-poisson": poisson,
    "serving-start": start, "serving-peers": side_by_side, "serving-replay": replay,
}  # fmt: skip


def readme(folder: Path) -> list[str]:
    """Ours and the faster form of llama.cpp, by precision and clients, of what there is data for."""
    head, rows, machines = ("weights", "clients", "tokens/s", "against", *(f"{v}, ratio" for v in FIGURES.values())), [], []
    for precision in ("float32", "int8"):
        path = folder / f"serving-{precision}.json"
        if not path.exists():
            continue
        doc = msgspec.json.decode(path.read_bytes(), type=Document)
        m = doc.machine
        of_what = f"{m['cpu']}, {m['cores']} cores, {', '.join(m['isa'])}, {doc.date[:10]}"
        machines.append(f"{precision}: {of_what}, {counted(rounds_of(doc), 'round')}")
        for n in doc.work["clients"]:
            of = {c.figure: c for c in doc.claims if c.clients == n}
            if tokens := of.get("tokens_per_second"):
                rows.append((
                    precision, n, f"{tokens.ours.median:.1f}", tokens.rival, *(f"{of[f].ratio.median:.2f} ×" for f in FIGURES),
                ))  # fmt: skip
    if not rows:
        return []
    return [*table(head, rows), "", f"Medians of pairs of one run; above 1 ours is faster. {'; '.join(machines)}."]

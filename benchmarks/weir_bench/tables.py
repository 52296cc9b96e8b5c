"""The figures in docs/benchmarks.md and README.md, from the raw data: what has been measured stands there, nothing else.

    PYTHONPATH=benchmarks python -m weir_bench.tables
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weir_bench import results
from weir_bench.results import table
from weir_bench.serving import report

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures: weir_bench.tables -->", "<!-- end of figures -->"
"""What lies between them on a page is generated."""


def overhead(d: dict[str, Any]) -> list[str]:
    f, steps = d["figures"], d["rows"]["step_microseconds"]
    return [
        f"{f['cpu_microseconds_per_token']:.1f} µs of CPU for each token at 32 rows, {f['tokens_per_second']:,.0f} tokens/s. "
        f"A step with 1,000 waiting takes {f['step_with_1000_waiting_against_10']:.2f} times one with 10. "
        f"Of {d['long']['requests']:,} requests the last tenth took {f['last_tenth_against_second']:.2f} times as long as the "
        f"second, and memory grew by {f['memory_growth_bytes'] / 1e6:.1f} MB.",
        "",
        *table(("rows", *steps), [("µs of CPU a step", *(f"{s['median']:.0f}" for s in steps.values()))]),
    ]


def attention(d: dict[str, Any]) -> list[str]:
    head = ("rows x tokens", "in place, ms", "gathered, ms", "ratio", "GB/s read in place", "roof beside it", "share")
    rows = [
        (n, f"{c['paged_seconds'] * 1e3:.2f}", *((f"{c['gather_seconds'] * 1e3:.2f}", f"{c['gather_against_paged']:.1f}")
         if "gather_seconds" in c else ("–", "–")), f"{c['paged_bytes_per_second'] / 1e9:.1f}",
         *((f"{c['read_roof'] / 1e9:.1f}", f"{c['read_roof_share']:.0%}") if c["read_roof"] else ("–", "–")))
        for n, c in d["figures"].items()
    ]  # fmt: skip
    return table(head, rows)


def steps(d: dict[str, Any]) -> list[str]:
    def share(value: float | None) -> str:
        return f"{value:.0%}" if value is not None else "–"

    rows = [
        (weights, n, f"{c['seconds']['median'] * 1e3:.2f}", f"{c['tokens_per_second']:.0f}", share(c["read_share"]),
         share(c["fma_share"]))
        for weights, cells in d["figures"].items() for n, c in cells.items()
    ]  # fmt: skip
    head = ("weights", "rows", "a step, ms", "tokens/s", "of the read roof", "of the multiply-add roof")
    return [f"Rows of {d['context']} tokens, roofs measured beside each cell.", "", *table(head, rows)]


def prefix(d: dict[str, Any]) -> list[str]:
    f = d["figures"]
    warm, cold = (f[f"ttft_seconds_{name}"]["median"] for name in ("with_sharing", "without"))
    return [
        f"Eight requests hold the prefix {f['copies_of_the_prefix']:g} time: {f['used_bytes_with_sharing'] / 2**20:.0f} MiB in "
        f"use against {f['used_bytes_without'] / 2**20:.0f}, {f['saved_bytes'] / 2**20:.0f} MiB less. First tokens after "
        f"{warm:.2f} s against {cold:.2f} s (medians). Tokens and log-probabilities are "
        f"{'the cold ones, bit for bit' if f['identical_to_cold'] else 'NOT those of the cold run'}."
    ]


def streams(d: dict[str, Any]) -> list[str]:
    rows = [(n, f"{c['itl_p95'] * 1e3:.0f}", f"{c['ttft']:.2f}") for n, c in d["figures"].items()]
    return table(("chunk", "time between tokens, p95, ms", f"first token of {d['prompt']} tokens, s"), rows)


def watermark(d: dict[str, Any]) -> list[str]:
    counted, timed = d["figures"]["counted"], d["figures"]["timed"]
    head = ("watermark", "preemptions", "reclaims by decodes", "turns", "steps", "computed again", "seconds, timed sets")
    names = ("preemptions", "reclaims_by_decodes", "turns", "steps", "recomputed_tokens")
    return table(head, [(w, *(f"{c[n]:.0f}" for n in names), f"{timed[w]['seconds']:.1f}") for w, c in counted.items()])


def policies(d: dict[str, Any]) -> list[str]:
    head = ("pool, victims, eviction", "preemption tax", "preemptions", "prompt tokens found", "first token, p95, s")
    rows = [
        (n, f"{c['tax']['median']:.1%}", f"{c['preempted']['median']:.0f}", f"{c['hit_share']['median']:.1%}",
         f"{c['ttft_p95']['median']:.1f}")
        for n, c in d["figures"].items() if n != "real tax"
    ]  # fmt: skip
    real = "; ".join(f"{n} {', '.join(f'{t:.1%}' for t in taxes)}" for n, taxes in d["figures"]["real tax"].items())
    return [*table(head, rows), "", f"Tax on the real model, in real time: {real}."]


def quality(d: dict[str, Any]) -> list[str]:
    rows = [
        (f"a scale for {int(n) or 'a row'}" if n.isdigit() else n, f"{c['argmax_agreement']:.2%}", f"{c['mean_kl']:.5f}",
         f"{c['perplexity']:.3f}", f"{c['perplexity_change']:+.2%}")
        for n, c in d["weights"].items()
    ]  # fmt: skip
    head = ("weights", "same most likely token", "KL, nats", "perplexity", "change")
    return [*table(head, rows), "", f"{d['tokens']:,} tokens of {d['text']}."]


def memory(d: dict[str, Any]) -> list[str]:
    f = d["figures"]
    return [
        f"{f['anonymous_bytes'] / 1e6:.0f} MB with the pool full, of {f['bound_bytes'] / 1e6:.0f} allowed. Of what lies above "
        f"a lowered budget {f['returned_share']:.0%} came back within {f['returned_within_seconds']:.1f} s of the last end. "
        f"{d['endurance']['requests']:,} requests later: {f['growth_over_requests']:+.2%}; leaked: "
        f"{', '.join(f'{n} {c}' for n, c in f['leaked'].items())}."
    ]


def footprint(d: dict[str, Any]) -> list[str]:
    rows = [(n, *(f"{c[k] / 2**20:.0f}" for k in ("anonymous", "pss"))) for n, c in d["figures"].items()]
    slots = f"{d['work']['slots']} slots of {d['work']['slot_tokens']} tokens"
    return table((slots, "anonymous, MiB", "with mapped files, MiB"), rows)


def fuzz(d: dict[str, Any]) -> list[str]:
    f, c = d["figures"], d["counters"]
    told = ("preempted", "offloads", "soft_resets", "prefix_hits", "adopted_evictions", "bypassed", "promoted")
    counts = ", ".join(f"{name.replace('_', ' ')} {c[name]:,}" for name in told)
    return [
        f"{f['steps']:,} steps in {f['walks']:,} walks from seed {f['seed']}, {f['failures']} failures; on the way {counts}."
    ]


def scale(d: dict[str, Any]) -> list[str]:
    f = d["figures"]
    count = f"{f['resources']:,}"
    rows = [(f"{count} resources Ready after the operator's start", f"{f['ready_seconds']:.0f} s", "90 s")]
    if "bare_seconds" in f:
        said = f"{f['bare_seconds']:.0f} s, with {f['bare_requests_a_resource']:.1f} requests each: " \
            f"the operator takes {f['ready_seconds'] / f['bare_seconds']:.2f} × as long"
        rows.append(("the least writes that make them Ready, by a client that does nothing else", said, "–"))
    if "requests_a_resource" in f:
        rows.append(("the same: requests to the API for each, with status and events", f"{f['requests_a_resource']:.1f}", "16"))
    if "still_seconds" in f:
        writes = ", ".join(f"{n} {what}" for what, n in f["still_writes"].items()) or "none"
        rows += [
            (f"standing still for {f['still_seconds']:.0f} s, {f['still_polls_a_second']:.0f} polls a second: CPU",
             f"{f['still_cpu_share_of_a_core']:.0%} of a core", "35 %"),
            ("the same: memory (RSS)", f"{f['still_rss_bytes'] / 1e6:.0f} MB", "300 MB"),
            ("the same: writes to the API, but the Lease", writes, "none"),
        ]  # fmt: skip
    if change := f.get("change_seconds"):
        said = f"{change['p50']:.2f} s, 95 % within {change['p95']:.2f} s, all {f['changes']} within {change['most']:.2f} s"
        rows.append((f"a change of one among {count}: its children are changed after", said, "2 s, 95 %"))
    if "takeover_seconds" in f:
        rows += [
            ("a leader killed: the next change is carried out after", f"{f['takeover_seconds']:.1f} s", "20 s"),
            ("the one that took over: memory (RSS)", f"{f['takeover_rss_bytes'] / 1e6:.0f} MB", "–"),
        ]  # fmt: skip
    return table(("what", "measured", "goal"), rows)


def churn(d: dict[str, Any]) -> list[str]:
    f = d["figures"]
    left = ", ".join(f"{n} {kind}" for kind, n in f["left"].items() if n) or "nothing"
    return [
        f"{f['resources']:,} resources made, Ready, changed and deleted in waves of {f['wave']} ({f['operations']:,} "
        f"operations in {f['seconds']:.0f} s): memory of the last third against that of the second {f['rss_growth']:+.1%} "
        f"({f['rss_bytes'][-1] / 1e6:.0f} MB at the end); left behind: {left}; passes that failed: "
        f"{f['passes_that_failed']:.0f}."
    ]


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "overhead": overhead, "steps": steps, "attention": attention, "prefix": prefix, "streams": streams, "watermark": watermark,
    "policies": policies, "quality": quality, "memory": memory, "fuzz": fuzz, "scale": scale, "churn": churn,
    **report.SECTIONS, "serving-footprint": footprint,
}  # fmt: skip


def render(folder: Path) -> str:
    """All sections that there is data for; data of another shape than today's command writes is left out by name."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        d = json.loads(path.read_text())
        m = d["machine"]
        lines += [f"### {name}", "", f"{m['cpu']}, {m['cores']} cores, {', '.join(m['isa'])}; {d['date'][:10]}; load "
                  f"{m['load_average'][0]}.", ""]  # fmt: skip
        try:
            lines += [*section(d), ""]
        except (KeyError, msgspec.ValidationError) as e:
            lines += [f"Written by an older form of the command ({e}): run it again.", ""]
    return "\n".join(lines)


def generate(folder: Path, root: Path = ROOT) -> None:
    """Both pages under `root`, from the raw data in `folder`."""
    for page, text in (("docs/benchmarks.md", render(folder)), ("README.md", "\n".join(report.readme(folder)))):
        if text:
            (root / page).write_text(between((root / page).read_text(), text))


def between(page: str, text: str) -> str:
    """`page` with `text` between its marks. Raises ValueError where it has none."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"a page needs {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def main() -> None:
    generate(results.arguments("tables", __doc__, model=False).parse_args().output)


if __name__ == "__main__":
    main()

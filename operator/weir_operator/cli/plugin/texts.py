"""Explanations in plain sentences, from what the tuner says of a pod, or from the status where it cannot be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNITS = {
    "a": ("a step", 1e3, "ms"), "b": ("a row", 1e3, "ms"), "c": ("a context token", 1e6, "µs"),
    "p": ("a prefilled token", 1e3, "ms"),
}
BOUND_WORDS = {
    "slots": "all slots of the batch are taken", "kv": "KV memory is full", "prefill": "prompts wait for their turn to be read",
    "drain": "a lowered batch is still draining",
}


def tuning_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """status.tuning of a resource; empty before there is one."""
    return dict((raw.get("status") or {}).get("tuning") or {})


def knobs_text(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in knobs.items()) or "unknown"


def changes_text(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {_value(knob, a)} → {_value(knob, b)}" for knob, (a, b) in entry.get("changes", {}).items())


def _value(knob: str, value: float) -> str:
    if knob == "kv_cache_budget":
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.0%}" if knob == "admission_watermark" else f"{value:g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def heading(raw: Mapping[str, Any]) -> list[str]:
    """Mode, objectives, attainment, and what the conditions say of tuning."""
    status, slo = raw.get("status") or {}, raw["spec"].get("slo") or {}
    tuning = tuning_of(raw)
    goal = f"{slo['ttft']} to the first token, {slo['tpot']} a token" if slo.get("ttft") and slo.get("tpot") else ""
    said = [condition(status, kind).get("message", "unknown") for kind in ("Tuned", "Saturated", "MetricsAvailable")]
    sentences = " ".join(s if s.endswith(".") else s + "." for s in said)
    larger = (tuning.get("proposal") or {}).get("maxBatchSize")
    offer = [f"Proposed: engine.limits.maxBatchSize {larger}, which restarts pods (tuning.envelope)."] if larger else []
    return [
        f"Mode: {tuning.get('mode', 'not reported yet')}. Objectives: {goal or 'none, so nothing is tuned (spec.slo)'}.",
        f"Attainment: {tuning.get('slo', 'too few requests to say')}. {sentences}",
        *offer,
    ]


def from_status(raw: Mapping[str, Any]) -> str:
    """What each pod's knobs are and what was done last, as of the last write of the status."""
    tuning = tuning_of(raw)
    latest: dict[str, Mapping[str, Any]] = {}
    for entry in tuning.get("history", ()):
        latest.setdefault(entry["pod"], entry)
    lines = []
    for pod in tuning.get("pods", ()):
        lines.append(f"{pod['name']}: {knobs_text(pod['knobs'])}.")
        if entry := latest.get(pod["name"]):
            lines.append(f"  {entry['outcome']} ({entry['rule']}) at {entry['time']}: {entry['reason']}")
            lines += _figures(entry, "  ")
    return "\n".join(lines)


def _figures(entry: Mapping[str, Any], indent: str) -> list[str]:
    """What a decision predicted, and what was observed of the one before."""
    told = [(part, values) for part in ("predicted", "observed") if (values := entry.get(part))]
    return [f"{indent}{part}: " + ", ".join(f"{k} {v}" for k, v in values.items()) for part, values in told]


def count_text(count: Mapping[str, Any], now: float) -> str:
    """The number of pods, where the operator sets it: why it is what it is, and what would change it."""
    head = f"Pods: {count['desired']} wanted, {count['min']} to {count['max']} allowed."
    why = f" {count['outcome']}: {count['reason']}." if count["outcome"] else " Not looked at yet."
    change = ""
    if count["capacity"]:
        carried, spare = count["desired"] * count["capacity"], 1 - count["spare"]
        change = (
            f"\n  What would change it: over {spare * carried:.2g} rows/s offered in two looks running, or under "
            f"{spare * (carried - count['capacity']):.2g} for {duration(count['stabilisation'])}."
        )
    due = count["nextLook"]
    return head + why + (f" Next look in {duration(max(0.0, due - now))}." if due is not None else "") + change


def explained(pod: Mapping[str, Any], now: float, tick: float) -> RenderableType:
    """One pod as the tuner itself explains it."""
    lines = [Text(str(pod["pod"]), style="bold"), Text(f"  Now: {limit_text(pod.get('limit'), tick)}")]
    lines.append(Text(f"  Last: {last_text(pod, now)}"))
    if traffic := pod.get("traffic"):
        lines.append(Text(
            f"  Traffic: {traffic['offered']:.2f} rows/s offered, {traffic['output']:.0f} tokens out each, "
            f"{traffic['prefill']:.2f} tokens prefilled for each one out, {traffic['context']:.0f} tokens of context a row."
        ))
    if fit := pod.get("fit"):
        lines.append(Text(f"  Step: {fit_text(fit)}"))
    parts: list[RenderableType] = [*lines]
    if pod.get("settings"):
        parts += [Text("  Predicted of this setting and its neighbours:"), settings_table(pod["settings"])]
    parts += [Text(f"  {'What would change it: ' if not i else ''}{s}") for i, s in enumerate(pod.get("would_change", ()))]
    return Group(*parts)


def limit_text(limit: Mapping[str, Any] | None, tick: float) -> str:
    if not limit:
        return "not known, the pod was not read."
    counts = f"{limit['running']} of {limit['batch']} rows run, {limit['waiting']} of {limit['queue']} wait"
    if limit["kv_use"] is not None:
        counts += f", {limit['kv_use']:.0%} of the KV budget is used"
    if limit["what"] == "nothing":
        return f"nothing limits it: {counts}."
    waited = limit["head_wait"].get(limit["what"], 0.0)
    refused = f", {limit['refused']:.0f} rows were refused" if limit["refused"] else ""
    return (
        f"{limit['what']} limit it, {BOUND_WORDS.get(limit['what'], 'the queue waits')}: {counts}; over the last {tick:g} s "
        f"the head of the queue waited for it {waited:.0%} of the time{refused}."
    )


def last_text(pod: Mapping[str, Any], now: float) -> str:
    record, due = pod.get("record"), ""
    if pod.get("next_tick") is not None:
        due = f" The next decision is due in {max(0.0, pod['next_tick'] - now):.0f} s."
    if not record:
        return f"no decision yet.{due}"
    changes = f", {text}" if (text := changes_text(record)) else ""
    return f"{record['outcome']} ({record['rule']}){changes}, {max(0.0, now - record['t']):.0f} s ago: {record['reason']}.{due}"


def fit_text(fit: Mapping[str, Any]) -> str:
    """step = a + b·rows + c·context + p·prefill, with errors."""
    words = []
    for name, found in fit["coefficients"].items():
        per, scale, unit = UNITS[name]
        error = f" ± {found['error'] * scale:.2g}" if found["error"] is not None else ""
        if found["value"] or name == "a":
            words.append(f"{found['value'] * scale:.3g}{error} {unit} {per}")
    if not fit["steps"]:
        return " + ".join(words) + "; as the server measured itself at its start, no steps were seen yet."
    left = f", {fit['residual']:.0%} of a step unexplained" if fit["residual"] is not None else ""
    return " + ".join(words) + f"; from {fit['steps']:.0f} steps{left}."


def settings_table(settings: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("  ", "batch", "queue", "in time", "a token", "accepted", ""):
        table.add_column(name, justify="left" if not name.strip() else "right", no_wrap=True)
    for s in settings:
        mark = {"present": "now", "best": "best in reach"}.get(s["mark"], "")
        table.add_row(
            "  ", str(s["batch"]), str(s["queue"]), f"{s['goodput']:.2f}/s", duration(s["interval"]), f"{s['accepted']:.0%}",
            mark, style={"present": "bold", "best": "green"}.get(s["mark"]),
        )
    return table


def history_text(raw: Mapping[str, Any]) -> str:
    lines = []
    for entry in tuning_of(raw).get("history", ()):
        lines.append(f"{entry['time']}  {entry['pod']}  {entry['outcome']} ({entry['rule']})  {changes_text(entry)}".rstrip())
        lines.append(f"    {entry['reason']}")
        lines += _figures(entry, "    ")
    return "\n".join(lines) or "no decision yet"


def advice(pods: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A sentence for each pod, and the start values that the weakest advice agrees on, as a part of a manifest."""
    lines, best = [], []
    for pod in pods:
        settings = pod.get("settings", ())
        present = next((s for s in settings if s["mark"] == "present"), None)
        better = next((s for s in settings if s["mark"] == "best"), None)
        if present is None or not pod.get("reachable"):
            lines.append(f"{pod['pod']}: no advice. {' '.join(pod.get('would_change', ()))}".rstrip())
            continue
        best.append(better or present)
        if better is None:
            kept = f"batch {present['batch']} and queue {present['queue']}"
            lines.append(f"{pod['pod']}: keep {kept}: nothing in reach is better by enough.")
        else:
            lines.append(
                f"{pod['pod']}: batch {present['batch']} → {better['batch']}, queue {present['queue']} → {better['queue']}: "
                f"{better['goodput']:.2f} rows/s in time are predicted, {present['goodput']:.2f} as it is."
            )
    if not best:
        return "\n".join(lines), {}
    least = min(best, key=lambda s: (s["batch"], s["queue"]))
    initial = {"maxBatchSize": {"initial": least["batch"]}, "maxQueueDepth": {"initial": least["queue"]}}
    return "\n".join(lines), {"spec": {"tuning": {"knobs": initial}}}

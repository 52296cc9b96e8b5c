"""Recorded traffic, open loop: goodput of ours and a rival under the same arrivals, scaled to this machine.

The traces are those of Azure (conversation, code; CC-BY-4.0, Patel et al., Splitwise, ISCA'24); a folder with them is named
by --traces, none is part of this repository. Lengths are divided so that a request costs what one of the other tables costs;
time is stretched until the trace brings a share of the requests that this server can carry of such lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weir_bench.arrivals import Arrival
from weir_bench.goodput import Objectives, quantile, share
from weir_bench.load import Report
from weir_bench.serving import figures, rounds
from weir_bench.serving.run import Run, named
from weir_operator.simulate.traces import Shape, read, with_rate

OBJECTIVES = Objectives(ttft=2.0, tpot=0.1)
LOADS = (0.5, 0.7, 0.9)
SLOT_TOKENS = 1024
SOURCE = "Azure LLM inference traces 2023 (CC-BY-4.0; Patel et al., Splitwise, ISCA'24)"
PROBE = 64
"""Requests of the trace that the capacity is measured with."""


@dataclass(frozen=True, slots=True)
class Trace:
    file: str
    shape: Shape


TRACES = {
    "conversation": Trace("azure_2023_conv.csv", Shape(prompt_by=8, output_by=4, prompt_cap=768, output_cap=192)),
    "code": Trace("azure_2023_code.csv", Shape(prompt_by=16, output_by=1, prompt_cap=512, output_cap=192)),
}


async def replay(run: Run) -> Path | None:
    """Goodput under Azure's conversation and code traffic at several loads."""
    if run.traces is None:
        run.say("skipped replay: no folder of traces is given (--traces FOLDER)")
        return None
    setting = replace(run.setting, slot_tokens=SLOT_TOKENS)
    able, cells = run.contenders([*named("weir", "float32"), *named("llama.cpp", "float32")]), []
    async with rounds.all_up(able, setting) as up:
        for name, trace in TRACES.items():
            rows = read(run.traces / trace.file, trace.shape)
            probe = [Arrival(0, r.prompt, r.output) for r in rows[:PROBE]]
            most = await rounds.saturation(up["weir float32"], probe, setting.slots)
            for _, load, server in figures.turns(1, LOADS, list(up)):
                scaled = with_rate(rows, load * most, run.form.seconds)
                arrivals = [Arrival(r.at, r.prompt, r.output) for r in scaled]
                report = await rounds.offer(up[server], arrivals, seed=3)
                cells.append({"trace": name, "load": load, "rate": load * most, "server": server, **outcome(report)})
                run.say(f"{name}, load {load:.0%}, {server}: goodput {cells[-1]['goodput']:.0%} of {len(arrivals)} requests")
        servers = rounds.by_name(up)
    work = {
        "objectives": {"ttft": OBJECTIVES.ttft, "tpot": OBJECTIVES.tpot}, "seconds": run.form.seconds,
        "slot_tokens": SLOT_TOKENS, "source": SOURCE,
    }  # fmt: skip
    return run.write("replay", {"cells": cells}, work, servers)


def outcome(report: Report) -> dict[str, Any]:
    ttft = [o.ttft for o in report.outcomes if o.ttft is not None]
    tpot = [o.tpot for o in report.outcomes if o.tpot is not None]
    return {
        "requests": len(report.outcomes), "goodput": share(report.outcomes, OBJECTIVES),
        "refused": sum(o.status == 503 for o in report.outcomes), "broken": sum(o.broken for o in report.outcomes),
        "good_per_second": (share(report.outcomes, OBJECTIVES) or 0.0) * len(report.outcomes) / report.seconds,
        "ttft_p50": quantile(ttft, 0.5), "ttft_p95": quantile(ttft, 0.95), "tpot_p50": quantile(tpot, 0.5),
        "tpot_p95": quantile(tpot, 0.95), "generator_lag_p99": report.lag_p99, "generator_cpu": report.cpu,
    }  # fmt: skip

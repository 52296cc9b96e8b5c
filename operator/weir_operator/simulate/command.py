"""`weir-operator simulate`: what the tuner would do for a plant and a load, beside the defaults and the best static setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weir_operator.simulate.load import Phase
from weir_operator.simulate.pod import PodSetup
from weir_operator.simulate.run import Result, grid, static, tuned
from weir_operator.tuner.chain import Model
from weir_operator.tuner.types import Mix, TunerSpec
from weir_server.contract import Knobs, Plant, Slo

BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
DEPTHS = (1, 2, 4, 8, 16)


def simulate(
    plant: Annotated[str, typer.Option(
        help="Step time: a,b,c,p in milliseconds (per step, row, context token, prefill token).",
    )] = "42,3.2,0.0001,2",
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that a step takes while rows decode.")] = 64,
    prompt: Annotated[float, typer.Option(min=2, help="Mean prompt tokens.")] = 128,
    output: Annotated[float, typer.Option(min=2, help="Mean generated tokens.")] = 64,
    cv: Annotated[float, typer.Option(min=0, help="Coefficient of variation of both lengths (lognormal).")] = 0.5,
    rate: Annotated[float | None, typer.Option(min=0, help="Rows offered per second.")] = None,
    load: Annotated[float, typer.Option(min=0, help="Without --rate: the load as a multiple of capacity at --batch.")] = 1.5,
    ttft: Annotated[float, typer.Option(min=0.001, help="Objective: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(min=0.0001, help="Objective: seconds per output token.")] = 0.108,
    batch: Annotated[int, typer.Option(min=1, help="Boot value of max_batch_size.")] = 4,
    depth: Annotated[int, typer.Option(min=1, help="Boot value of max_queue_depth.")] = 32,
    watermark: Annotated[float, typer.Option(min=0, max=0.5, help="Boot value of admission_watermark.")] = 0.01,
    kv_blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 16 tokens.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Envelope of max_batch_size.")] = 64,
    seconds: Annotated[float, typer.Option(min=60, help="Simulated time.")] = 900.0,
    tick: Annotated[float, typer.Option(min=1, help="Seconds between decisions.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and noise.")] = 1,
    search: Annotated[bool, typer.Option("--grid/--no-grid", help="Look for the best static setting too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate one pod under load: goodput with the defaults, with the best setting that stays, and with the tuner.

    The server's scheduler, cache and queue gate and the operator's own decisions run as they are; only the forward pass is a
    formula. Goodput is the share of the rows offered (refused ones included) that met both objectives, after a first fifth.
    """
    measured = _plant(plant, prefill_tokens)
    if batch > max_batch:
        raise typer.BadParameter(f"{batch} is above the envelope of {max_batch}", param_hint="--batch")
    blocks_per_row = -(-(prompt + output) // 16)
    if blocks_per_row > kv_blocks:
        raise typer.BadParameter(f"{kv_blocks} blocks hold no mean row of {blocks_per_row:.0f}", param_hint="--kv-blocks")
    setup = PodSetup(
        measured, Slo(ttft, tpot), Knobs(batch, None, watermark, depth), (1, max_batch), (1, 256), kv_blocks,
        context=min(8192, 16 * kv_blocks), seed=seed,
    )
    offered = rate if rate is not None else load * _capacity(measured, prompt, output, batch)
    phases = [Phase(seconds, offered, prompt, output, cv)]
    default = static(setup, phases, seed)
    best = grid(setup, phases, seed, [b for b in BATCHES if b <= max_batch], DEPTHS) if search else None
    run = tuned(setup, phases, seed, TunerSpec(ttft, tpot, tick_seconds=tick))
    report = _report(offered, default, best, run)
    print(json.dumps(report)) if as_json else _print(report)


def _plant(text: str, prefill_tokens: int) -> Plant:
    try:
        a, b, c, p = (float(v) / 1000 for v in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not four numbers a,b,c,p", param_hint="--plant") from None
    if min(a, b, c, p) < 0 or a + b <= 0:
        raise typer.BadParameter("the numbers must not be negative, and a step must take time", param_hint="--plant")
    return Plant(a, b, c, p, prefill_tokens)


def _capacity(plant: Plant, prompt: float, output: float, batch: int) -> float:
    """Rows per second that so many slots finish."""
    return Model(plant, Mix(1.0, (1.0,), output, prompt / output, prompt + output / 2), {}, {}).departures(batch)


def _report(offered: float, default: Result, best: tuple[Knobs, Result] | None, run: Result) -> dict[str, Any]:
    report: dict[str, Any] = {
        "offered_rows_per_second": offered,
        "default": {"goodput": default.goodput, "knobs": asdict(default.knobs)},
        "tuned": {"goodput": run.goodput, "knobs": asdict(run.knobs), "reversals": run.reversals},
        "moves": [{"t": t, "rule": m.rule, "knobs": dict(m.knobs), "reason": m.reason} for t, m in run.moves],
        "outcomes": [{"t": r.t, "rule": r.rule, "outcome": r.outcome, "reason": r.reason} for r in run.records],
    }
    if best is not None:
        knobs, result = best
        report["best_static"] = {"goodput": result.goodput, "knobs": asdict(knobs)}
        report["tuned"]["of_best_static"] = run.goodput / result.goodput if result.goodput else None
        report["tuned"]["regret_rows"] = len(result.good) - len(run.good)
    return report


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{report['offered_rows_per_second']:.2f} rows/s offered")
    for heading in ("setting", "goodput", "batch", "queue", "watermark"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for key, name in (("default", "boot values"), ("best_static", "best static"), ("tuned", "tuned (at the end)")):
        if key in report:
            k = report[key]["knobs"]
            values = (k["max_batch_size"], k["max_queue_depth"], k["admission_watermark"])
            table.add_row(name, f"{report[key]['goodput']:.1%}", *map(str, values))
    console.print(table)
    tuned = report["tuned"]
    if "best_static" in report and tuned["of_best_static"] is not None:
        console.print(f"Tuned reached {tuned['of_best_static']:.0%} of the best static setting; over the whole run, learning "
                      f"included, that cost {tuned['regret_rows']} good rows. Reversals: {tuned['reversals']}.")
    for move in report["moves"]:
        knobs = ", ".join(f"{k} {v:g}" for k, v in move["knobs"].items())
        console.print(f"{move['t']:6.0f} s  {move['rule']}: {knobs}. {move['reason']}", markup=False, soft_wrap=True)

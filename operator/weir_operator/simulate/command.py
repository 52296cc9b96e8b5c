"""`weir-operator simulate`: what the tuner would do for a plant and a load, beside the defaults and the best static setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weir_operator.simulate import plants, traces
from weir_operator.simulate.fleet import ROUTERS, FleetResult, Retries, fleet
from weir_operator.simulate.load import Arrival, Phase, arrivals
from weir_operator.simulate.plot import NoMatplotlib, draw
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.rivals import RIVALS, rival
from weir_operator.simulate.run import Law, Result, grid, static, tuned
from weir_operator.tuner.chain import Model
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import Mix, TunerSpec
from weir_server.contract import Knobs, Plant, Slo

BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTHS = (1, 2, 4, 8, 16)
SET_POINT = "set-point"


def simulate(
    plant: Annotated[str, typer.Option(
        help="Step time: a,b,c,p in ms (per step, row, context token, prefill token), a file (JSON, decision log, measured "
             "CSV), or the http address of a live server's control port.",
    )] = "42,3.2,0.0001,2",
    machine: Annotated[str, typer.Option(help="Of a measured CSV: model,hardware,tensor_parallel.")] = "",
    token_file: Annotated[Path | None, typer.Option(help="Bearer token of a live server's control port.")] = None,
    measure: Annotated[float, typer.Option(min=1, help="Seconds for which a live server is watched.")] = 60.0,
    prefill_tokens: Annotated[int | None, typer.Option(
        min=1, help="Prompt tokens of a step (default: the server's own, 64 while rows decode and 512 otherwise).",
    )] = None,
    trace: Annotated[Path | None, typer.Option(help="A recorded trace (Azure, Mooncake, ServeGen) as the load.")] = None,
    trace_start: Annotated[float, typer.Option(min=0, help="Seconds of the trace that are skipped.")] = 0.0,
    prompt_by: Annotated[float, typer.Option(min=0.01, help="Divide the trace's prompt lengths.")] = 1.0,
    output_by: Annotated[float, typer.Option(min=0.01, help="Divide the trace's output lengths.")] = 1.0,
    prompt_cap: Annotated[int, typer.Option(min=1, help="Most prompt tokens of a row.")] = 1 << 30,
    output_cap: Annotated[int, typer.Option(min=1, help="Most output tokens of a row.")] = 1 << 30,
    prompt: Annotated[float, typer.Option(min=2, help="Without --trace: mean prompt tokens.")] = 128,
    output: Annotated[float, typer.Option(min=2, help="Without --trace: mean generated tokens.")] = 64,
    cv: Annotated[float, typer.Option(min=0, help="Without --trace: coefficient of variation of both (lognormal).")] = 0.5,
    rate: Annotated[float | None, typer.Option(min=0, help="Rows offered per second, mean; a trace is squeezed to it.")] = None,
    load: Annotated[float, typer.Option(min=0, help="Without --rate: the load as a multiple of capacity at --batch.")] = 1.5,
    ttft: Annotated[float, typer.Option(min=0.001, help="Objective: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(min=0.0001, help="Objective: seconds per output token.")] = 0.108,
    batch: Annotated[int, typer.Option(min=1, help="Boot value of max_batch_size.")] = 4,
    depth: Annotated[int, typer.Option(min=1, help="Boot value of max_queue_depth.")] = 32,
    watermark: Annotated[float, typer.Option(min=0, max=0.5, help="Boot value of admission_watermark.")] = 0.01,
    kv_blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 16 tokens.")] = 8192,
    context: Annotated[int, typer.Option(min=16, help="Most tokens of a row, prompt and answer.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Envelope of max_batch_size.")] = 64,
    pods: Annotated[int, typer.Option(min=1, help="Pods behind the router.")] = 1,
    router: Annotated[str, typer.Option(help=f"How rows are spread: {', '.join(ROUTERS)}.")] = "least-loaded",
    retries: Annotated[int, typer.Option(min=0, help="How often a refused client comes back (1 s, doubling).")] = 0,
    slow_start: Annotated[float, typer.Option(min=0, help="Seconds until a pod serves, the first one excepted.")] = 0.0,
    law: Annotated[str, typer.Option(help=f"Who moves the knobs: {', '.join((SET_POINT, *RIVALS))}.")] = SET_POINT,
    seconds: Annotated[float, typer.Option(min=60, help="Simulated time.")] = 900.0,
    tick: Annotated[float, typer.Option(min=1, help="Seconds between decisions.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and noise.")] = 1,
    search: Annotated[bool, typer.Option("--grid/--no-grid", help="Look for the best static setting too.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw goodput and knobs over time into this file (one pod).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate pods under load: goodput with the defaults, with the best setting that stays, and with the tuner.

    The server's scheduler, cache and queue gate and the operator's own decisions run as they are; only the forward pass is a
    formula. Goodput is the share of the rows offered (refused ones included) that met both objectives, after a first fifth.
    """
    measured = _plant(plant, prefill_tokens or 64, machine, token_file, measure)
    _check(batch, max_batch, router, law, plot, pods)
    context = min(context, 16 * kv_blocks)
    setup = PodSetup(
        measured, Slo(ttft, tpot), Knobs(batch, None, watermark, depth), (1, max_batch), (1, 256), kv_blocks, context=context,
        chunk=prefill_tokens, seed=seed,
    )
    if trace is not None:
        shape = traces.Shape(trace_start, float("inf"), 1.0, prompt_by, output_by, prompt_cap, output_cap, context)
        rows = _traced(trace, shape, rate, seconds, seed)
    else:
        if -(-(prompt + output) // 16) > kv_blocks:
            raise typer.BadParameter(f"{kv_blocks} blocks hold no mean row", param_hint="--kv-blocks")
        offered = rate if rate is not None else pods * load * _capacity(measured, prompt, output, batch)
        rows = list(arrivals([Phase(seconds, offered, prompt, output, cv)], seed, context))
    if not rows:
        raise typer.BadParameter("no row is offered in the time that is simulated", param_hint="--rate")
    study = Study(setup, rows, seconds, TunerSpec(ttft, tpot, tick_seconds=tick), pods, router, retries, slow_start, law)
    report, runs = _single(study, search) if study.alone else _many(study, search)
    if plot is not None:
        try:
            draw(plot, seconds, [row.at for row in rows], runs, setup.boot)
        except (NoMatplotlib, OSError) as e:
            raise typer.BadParameter(str(e), param_hint="--plot") from None
    print(json.dumps(report)) if as_json else _print(report)


@dataclass(frozen=True)
class Study:
    setup: PodSetup
    rows: Sequence[Arrival]
    seconds: float
    spec: TunerSpec
    pods: int
    router: str
    retries: int
    slow_start: float
    law: str

    @property
    def alone(self) -> bool:
        return self.pods == 1 and not self.retries

    @property
    def batches(self) -> list[int]:
        return [b for b in BATCHES if b <= self.setup.batch_limits[1]]

    def chosen(self) -> Law:
        return decide if self.law == SET_POINT else rival(self.law)

    def run(self, knobs: Knobs, tuned_: bool) -> FleetResult:
        setup = replace(self.setup, boot=knobs)
        setups = [setup, *[replace(setup, starts_after=self.slow_start)] * (self.pods - 1)]
        return fleet(
            setups, self.rows, self.seconds, router=self.router, retries=Retries(times=self.retries) if self.retries else None,
            spec=self.spec if tuned_ else None, law=self.chosen(), seed=self.setup.seed,
        )


def _check(batch: int, max_batch: int, router: str, law: str, plot: Path | None, pods: int) -> None:
    if batch > max_batch:
        raise typer.BadParameter(f"{batch} is above the envelope of {max_batch}", param_hint="--batch")
    if router not in ROUTERS:
        raise typer.BadParameter(f"{router!r} is none of {', '.join(ROUTERS)}", param_hint="--router")
    if law != SET_POINT and law not in RIVALS:
        raise typer.BadParameter(f"{law!r} is none of {', '.join((SET_POINT, *RIVALS))}", param_hint="--law")
    if plot is not None and pods > 1:
        raise typer.BadParameter("shows one pod's knobs", param_hint="--plot")


def _plant(text: str, prefill_tokens: int, machine: str, token_file: Path | None, seconds: float) -> Plant:
    try:
        if text.startswith(("http://", "https://")):
            return plants.from_server(text, token_file.read_text().strip() if token_file else "", seconds)
        if Path(text).is_file():
            return plants.from_file(Path(text), prefill_tokens, machine)
        return plants.given(text, prefill_tokens)
    except (plants.PlantError, OSError) as e:
        raise typer.BadParameter(str(e), param_hint="--plant") from None


def _traced(path: Path, shape: traces.Shape, rate: float | None, seconds: float, seed: int) -> list[Arrival]:
    try:
        rows = traces.read(path, shape, seed)
    except (traces.TraceError, OSError) as e:
        raise typer.BadParameter(str(e), param_hint="--trace") from None
    return traces.with_rate(rows, rate, seconds) if rate else [row for row in rows if row.at < seconds]


def _capacity(plant: Plant, prompt: float, output: float, batch: int) -> float:
    """Rows per second that so many slots finish."""
    return Model(plant, Mix(1.0, (1.0,), output, prompt / output, prompt + output / 2), {}, {}).departures(batch)


def _single(study: Study, search: bool) -> tuple[dict[str, Any], dict[str, Result]]:
    setup, rows, end = study.setup, study.rows, study.seconds
    default = static(setup, rows, end)
    best = grid(setup, rows, end, study.batches, DEPTHS) if search else None
    run = tuned(setup, rows, end, study.spec, study.chosen())
    runs = {"boot values": default, **({"best static": best[1]} if best else {}), "tuned": run}
    report = {
        **_heading(study),
        "default": {"goodput": default.goodput, "knobs": asdict(default.knobs)},
        "tuned": {"goodput": run.goodput, "knobs": asdict(run.knobs), "reversals": run.reversals},
        "moves": [{"t": t, "rule": m.rule, "knobs": dict(m.knobs), "reason": m.reason} for t, m in run.moves],
        "outcomes": [{"t": r.t, "rule": r.rule, "outcome": r.outcome, "reason": r.reason} for r in run.records],
    }
    if best is not None:
        _beside(report, *best, run)
    return report, runs


def _many(study: Study, search: bool) -> tuple[dict[str, Any], dict[str, Result]]:
    boot = study.setup.knobs
    default, run = study.run(boot, False), study.run(boot, True)
    report = {
        **_heading(study), "pods": study.pods,
        "default": {"goodput": default.goodput, "knobs": asdict(boot), "attempts": default.attempts},
        "tuned": {"goodput": run.goodput, "attempts": run.attempts},
        "moves": [{"t": t, "pod": m.pod, "rule": m.rule, "knobs": dict(m.knobs), "reason": m.reason} for t, m in run.moves],
        "outcomes": [{"t": r.t, "pod": r.pod, "rule": r.rule, "outcome": r.outcome, "reason": r.reason} for r in run.records],
    }
    if search:
        settings = [replace(boot, max_batch_size=b, max_queue_depth=q) for b in study.batches for q in DEPTHS]
        results = [(k, study.run(k, False)) for k in settings]
        knobs, best = max(results, key=lambda pair: pair[1].goodput)
        _beside(report, knobs, best, run)
    return report, {}


def _beside(report: dict[str, Any], knobs: Knobs, best: Result | FleetResult, run: Result | FleetResult) -> None:
    """Add the best static setting, and what the tuned run came to of it."""
    report["best_static"] = {"goodput": best.goodput, "knobs": asdict(knobs)}
    report["tuned"]["of_best_static"] = run.goodput / best.goodput if best.goodput else None
    report["tuned"]["regret_rows"] = len(best.good) - len(run.good)


def _heading(study: Study) -> dict[str, Any]:
    return {
        "law": study.law, "rows": len(study.rows), "seconds": study.seconds,
        "offered_rows_per_second": len(study.rows) / study.seconds, "plant": asdict(study.setup.plant),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{report['offered_rows_per_second']:.2f} rows/s offered")
    for heading in ("setting", "goodput", "batch", "queue", "watermark"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for key, name in (("default", "boot values"), ("best_static", "best static"), ("tuned", "tuned (at the end)")):
        if key in report:
            k = report[key].get("knobs", {})
            values = (k.get(name, "") for name in ("max_batch_size", "max_queue_depth", "admission_watermark"))
            table.add_row(name, f"{report[key]['goodput']:.1%}", *map(str, values))
    console.print(table)
    tuned = report["tuned"]
    if tuned.get("of_best_static") is not None:
        console.print(f"Tuned reached {tuned['of_best_static']:.0%} of the best static setting; over the whole run, learning "
                      f"included, that cost {tuned['regret_rows']} good rows." + _reversals(tuned), soft_wrap=True)
    for move in report["moves"]:
        knobs = ", ".join(f"{k} {v:g}" for k, v in move["knobs"].items())
        pod = f"{move['pod']}: " if "pod" in move else ""
        console.print(f"{move['t']:6.0f} s  {pod}{move['rule']}: {knobs}. {move['reason']}", markup=False, soft_wrap=True)


def _reversals(tuned: dict[str, Any]) -> str:
    return f" Reversals: {tuned['reversals']}." if "reversals" in tuned else ""

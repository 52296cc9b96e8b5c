"""A pod whose every number follows from an affine plant without noise: what the law's tests are driven by.

It shares no code with the chain: rows flow through it at the rate that the plant allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from weir_operator.tuner.law import decide
from weir_operator.tuner.types import HISTORY_SECONDS, Decision, PodView, Poll, TunerSpec, TunerState
from weir_server.contract import (
    BOUNDS,
    FINISH_REASONS,
    HISTOGRAMS,
    REFUSALS,
    SETTLED_HISTOGRAMS,
    SLOS,
    STEP_PRODUCTS,
    STEP_SUMS,
    ControlState,
    Envelope,
    Fence,
    Geometry,
    Histogram,
    Knobs,
    Plant,
    Slo,
    Window,
)

CPU = Plant(0.042, 0.0032, 0.0, 0.002, 64)
CHUNK = 1000
ENVELOPE = Envelope((1, 64), (10 * CHUNK, 1000 * CHUNK), (1, 256), (0.0, 0.5))
BOOT = Knobs(4, 1000 * CHUNK, 0.01, 32)
SPEC = TunerSpec(2.0, 0.108)


class FlowPod:
    """`offered` rows/s of `prompt` in, `output` out. Fields may be changed between polls to make something happen."""

    def __init__(self, plant: Plant = CPU, boot: Knobs = BOOT, offered: float = 1.6, prompt: float = 128, output: float = 64):
        self.plant, self.boot, self.offered, self.prompt, self.output = plant, boot, offered, prompt, output
        self.slo, self.envelope, self.instance = Slo(2.0, 0.108), ENVELOPE, "one"
        self.kv_rows: float | None = None  # rows that KV holds; the queue then waits for kv
        self.slowdown = 1.0  # of every step
        self.stalled = False  # nothing finishes
        self.tax = 0.0
        self.effective_lag = False  # a lowered batch does not come into force
        self.memory_used, self.memory_limit, self.kv_used_bytes = 10, 100, 0
        self.kv_used: float | None = None  # share of the budget; None: 1 % a row
        self.draining = False
        self.now = 0.0
        self.restart("one")

    def restart(self, instance: str) -> None:
        self.instance, self.target, self.effective, self.settled_at = instance, self.boot, self.boot, self.now
        self.totals = dict.fromkeys(
            ("decoding_seconds", "running_seconds", "waiting_seconds", "kv_used_byte_seconds", "recompute_seconds", "queued",
             "retried", "admitted", "preempted", "recomputed_tokens", "prompt_tokens", "generated_tokens"), 0.0)
        self.step, self.products = dict.fromkeys(STEP_SUMS, 0.0), dict.fromkeys(STEP_PRODUCTS, 0.0)
        self.head = dict.fromkeys(BOUNDS, 0.0)
        self.refused = {r: dict.fromkeys((*BOUNDS, "none"), 0.0) for r in REFUSALS}
        self.finished = dict.fromkeys(FINISH_REASONS, 0.0)
        self.good = dict.fromkeys(SLOS, 0.0)
        self.histograms = {h: Histogram() for h in HISTOGRAMS}
        self.settled = {h: Histogram() for h in SETTLED_HISTOGRAMS}
        self.running = 0.0

    def interval(self, rows: float) -> float:
        """Seconds between a row's tokens with so many in the batch."""
        p, context = self.plant, self.prompt + self.output / 2
        return (p.a + (p.b + p.c * context + p.p * self.prompt / self.output) * rows) * self.slowdown

    def between(self, rows: float) -> float:
        """Seconds between a row's tokens: a step without the row's own prefill, which came before."""
        return self.interval(rows) - self.plant.p * self.prompt / self.output * min(1.0, rows) * self.slowdown

    def set(self, knobs: Mapping[str, float]) -> None:
        self.target = self.target.merged({k: v if k == "admission_watermark" else int(v) for k, v in knobs.items()})
        if not self.effective_lag:
            self.effective = self.target
            if set(knobs) - {"max_queue_depth"}:
                self.settled_at, self.settled = self.now, {h: Histogram() for h in SETTLED_HISTOGRAMS}

    def advance(self, seconds: float) -> None:
        slots = min(self.effective.max_batch_size, self.kv_rows or 1e9)
        rate = slots / (self.output * self.interval(slots))
        saturated = self.offered >= rate
        rows = slots if saturated else _root(lambda n: n / (self.output * self.interval(n)) - self.offered, slots)
        y = self.interval(rows)
        steps = seconds / y if self.offered else 0.0
        done = 0.0 if self.stalled else min(rate, self.offered) * seconds
        self._work(seconds, rows, y, steps)
        self._rows(seconds, rows, y, done, rate, saturated)
        self.now += seconds

    def _work(self, seconds: float, rows: float, y: float, steps: float) -> None:
        context = rows * (self.prompt + self.output / 2)
        prefill = rows * self.prompt / self.output
        values = {"n": rows, "c": context, "p": prefill, "y": y}
        for name, value in zip(STEP_SUMS, (1.0, y, rows, context, prefill), strict=True):
            self.step[name] += steps * value
        for name in STEP_PRODUCTS:
            self.products[name] += steps * values[name[0]] * values[name[1]]
        t = self.totals
        t["recompute_seconds"] += self.tax * steps * y
        t["preempted"] += 5 if self.tax else 0
        if self.offered:
            t["decoding_seconds"] += seconds
            t["running_seconds"] += rows * seconds
            used = 0.01 * rows if self.kv_used is None else self.kv_used
            t["kv_used_byte_seconds"] += used * (self.effective.kv_cache_budget or 0) * seconds
        t["generated_tokens"] += steps * rows
        t["prompt_tokens"] += steps * prefill

    def _rows(self, seconds: float, rows: float, y: float, done: float, rate: float, saturated: bool) -> None:
        t, depth = self.totals, self.effective.max_queue_depth
        wait = depth / rate if saturated else 0.0
        refused = max(0.0, self.offered - rate) * seconds if saturated else 0.0
        bound = "kv" if self.kv_rows is not None else "slots"
        if saturated:
            self.head[bound] += seconds
            self.refused["queue_full"][bound] += refused
        t["queued"] += self.offered * seconds - refused
        t["admitted"] += done
        before, self.finished["length"] = self.finished["length"], self.finished["length"] + done
        first = wait + max(1.0, self.prompt / self.plant.prefill_tokens) * y
        for _ in range(int(self.finished["length"]) - int(before)):
            for histograms in (self.histograms, self.settled):
                histograms["tpot"].observe(self.between(rows))
                histograms["ttft"].observe(first)
            self.histograms["prefill_seconds"].observe(first - wait)
        for histograms in (self.histograms, self.settled):
            for _ in range(round(rows) if self.offered else 0):
                histograms["decode_interval"].observe(self.between(rows))
        if first <= self.slo.ttft and self.between(rows) <= self.slo.tpot:
            self.good["both"] += int(self.finished["length"]) - int(before)
        self.waiting, self.oldest_wait = (depth, wait) if saturated else (0, 0.0)
        self.running = rows if self.offered else 0.0

    def window(self) -> Window:
        whole = {k: int(v) for k, v in self.totals.items() if not k.endswith("seconds")}
        return Window.from_wire(Window(
            instance=self.instance, monotonic=self.now, settled_at=self.settled_at, target=self.target,
            effective=self.effective, envelope=self.envelope, draining=self.draining, running=round(self.running),
            prefilling=0, waiting=self.waiting, oldest_wait=self.oldest_wait, bound=None, memory_used=self.memory_used,
            memory_limit=self.memory_limit, kv_used_bytes=self.kv_used_bytes, head_wait_seconds=dict(self.head),
            step=dict(self.step), decode_only=dict.fromkeys(STEP_SUMS, 0.0), products=dict(self.products),
            refused={r: {b: int(n) for b, n in bounds.items()} for r, bounds in self.refused.items()},
            finished={r: int(n) for r, n in self.finished.items()}, cached_tokens=0,
            slo_good={s: int(n) for s, n in self.good.items()}, slo_total=int(self.finished["length"]),
            histograms=self.histograms, settled=self.settled, **{**self.totals, **whole},
        ).to_wire())

    def control(self) -> ControlState:
        return ControlState(
            {"major": 1, "minor": 0}, {}, self.instance, "", self.envelope, Geometry(CHUNK, 16, {}), self.boot, self.target,
            self.effective, self.boot, self.slo, self.plant, Fence(), {"expires_in_seconds": None}, False,
        )


def _root(f, high: float) -> float:
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high


class Loop:
    """Polls a pod, decides, applies. `through_json`: state and views make a round trip before each decision."""

    def __init__(self, pod: FlowPod, spec: TunerSpec = SPEC, through_json: bool = False):
        self.pod, self.spec, self.through_json = pod, spec, through_json
        self.state, self.polls, self.log = TunerState(), [], []
        self.now = 1000.0
        self.apply = True

    def poll(self, dropped: bool = False) -> Decision:
        self.pod.advance(self.spec.poll_seconds)
        self.now += self.spec.poll_seconds
        self.polls = [p for p in self.polls if p.at >= self.now - HISTORY_SECONDS]
        self.polls.append(Poll(self.now, None if dropped else self.pod.window()))
        view, state = PodView("p", "x", self.pod.control(), tuple(self.polls)), self.state
        if self.through_json:
            view = PodView.from_json(json.loads(json.dumps(view.to_json())))
            state = TunerState.from_json(json.loads(json.dumps(state.to_json())))
        decision = decide(state, {"p": view}, self.spec, self.now)
        self.state = decision.state
        self.log.append(decision)
        for move in decision.moves if self.apply else ():
            self.pod.set(move.knobs)
        return decision

    def run(self, seconds: float) -> list[Decision]:
        return [self.poll() for _ in range(round(seconds / self.spec.poll_seconds))]

    @property
    def records(self):
        return [r for d in self.log for r in d.records]

    @property
    def moves(self):
        return [m for d in self.log for m in d.moves]

    @property
    def me(self):
        return self.state.pods["p"]

    def outcomes(self) -> list[str]:
        return [str(r.outcome) for r in self.records]


def started(pod: FlowPod | None = None, spec: TunerSpec = SPEC, seconds: float = 35.0) -> Loop:
    """A loop that has just had its first tick."""
    loop = Loop(pod or FlowPod(), spec)
    loop.run(seconds)
    return loop


def with_boot(**knobs: float) -> Knobs:
    return replace(BOOT, **knobs)

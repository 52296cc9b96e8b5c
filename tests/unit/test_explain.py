"""What `explain` says of a pod: the same numbers that the law goes by, with their errors, and what would change its mind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from law_kit import CPU, SPEC, FlowPod, Loop, started

from weir_operator.tuner.explain import Explanation, explain, fit_of
from weir_operator.tuner.plant import PRIOR_POINTS
from weir_operator.tuner.setpoint import GAIN
from weir_operator.tuner.types import Outcome, PodView
from weir_server.contract import STEP_PRODUCTS, STEP_SUMS, Plant


def of(loop: Loop) -> Explanation:
    records = loop.records
    record = records[-1] if records else None
    view = PodView("p", "x", loop.pod.control(), tuple(loop.polls))
    return explain(loop.state.pods["p"], view, loop.spec, loop.now, record, loop.state.next_tick)


def noisy(plant: Plant, steps: int, sd: float, seed: int) -> dict[str, float]:
    """Sums of steps whose time is the plant's and a normal error."""
    draw = random.Random(seed)
    sums = dict.fromkeys((*STEP_SUMS, *STEP_PRODUCTS), 0.0)
    for _ in range(steps):
        n, prefill = draw.randint(1, 16), draw.choice((0, 0, 64))
        c = n * draw.randint(50, 400)
        x = {"n": n, "c": c, "p": prefill, "y": plant.step_seconds(n, c, prefill) + draw.gauss(0, sd)}
        for name, value in zip(STEP_SUMS, (1, x["y"], n, c, prefill), strict=True):
            sums[name] += value
        for name in STEP_PRODUCTS:
            sums[name] += x[name[0]] * x[name[1]]
    return sums


def test_the_errors_of_the_regression_cover_the_truth_as_often_as_they_say() -> None:
    plant = Plant(0.042, 0.0032, 2e-6, 0.002, 64)
    inside = total = 0
    for seed in range(60):
        fit = fit_of(noisy(plant, 400, 0.01, seed), None)
        assert fit is not None and fit.residual is not None
        for name, found in fit.coefficients.items():
            if found.error is not None:
                total += 1
                inside += abs(found.value - getattr(plant, name)) <= 2 * found.error
    assert total >= 200
    assert 0.90 <= inside / total <= 0.99  # two standard errors: 95 %


def test_the_residual_is_the_share_of_a_step_that_nothing_explains() -> None:
    sums = noisy(CPU, 4000, 0.01, 1)
    fit = fit_of(sums, None)
    assert fit is not None and fit.residual == pytest.approx(0.01 / (sums["step_seconds"] / 4000), rel=0.05)


def test_before_any_step_the_fit_is_the_boot_measurement_without_an_error() -> None:
    fit = fit_of({}, CPU)
    assert fit is not None and (fit.steps, fit.residual) == (0.0, None)
    assert fit.coefficients["a"].value == CPU.a and fit.coefficients["a"].error is None
    assert fit_of({}, None) is None and len(PRIOR_POINTS) == 5


def test_the_setting_marked_best_is_the_one_that_the_law_asks_for() -> None:
    shown = of(loop := started(spec=replace(SPEC, mode="Advise"), seconds=185))
    (present,) = [s for s in shown.settings if s.mark == "present"]
    (best,) = [s for s in shown.settings if s.mark == "best"]
    advised = loop.records[-1]
    assert (present.batch, present.queue) == (4, 32)
    assert (best.batch, best.queue) == (advised.changes["max_batch_size"][1], advised.changes["max_queue_depth"][1])
    assert best.goodput == pytest.approx(advised.predicted["goodput"], rel=1e-6)
    assert shown.would_change[0].startswith(f"Nothing: batch {best.batch} with queue {best.queue}")


def test_after_a_move_it_waits_for_its_verdict() -> None:
    shown = of(loop := started())
    assert shown.record is not None and shown.record.outcome is Outcome.MOVED
    assert f"move to max_batch_size {loop.moves[0].knobs['max_batch_size']}" in shown.would_change[0]


def test_a_steady_pod_says_what_a_better_setting_must_reach_and_what_limits_it() -> None:
    loop = started(seconds=400)
    shown = of(loop)
    assert shown.record is not None and shown.record.outcome is Outcome.HOLDING
    assert shown.limit is not None and shown.limit.what == "slots" and shown.limit.head_wait["slots"] > 0.9
    present = next(s for s in shown.settings if s.mark == "present")
    assert f"{GAIN * present.goodput:.2f} rows/s" in shown.would_change[0]
    assert all(s.goodput < GAIN * present.goodput for s in shown.settings)
    assert shown.traffic["offered"] == pytest.approx(1.6, rel=0.05)
    assert shown.fit is not None and shown.fit.coefficients["b"].value > 0


def test_idle_frozen_unread_and_kv_bound_pods_say_so() -> None:
    idle = Loop(FlowPod(offered=0.0))
    idle.run(65)
    assert of(idle).would_change == ("Traffic: nothing has arrived, and an idle pod is left as it is.",)
    assert of(idle).limit.what == "nothing"  # type: ignore[union-attr]
    frozen = started(spec=replace(SPEC, paused=True), seconds=65)
    assert "tuning is paused" in of(frozen).would_change[0]
    aimless = started(spec=replace(SPEC, ttft=None), seconds=65)
    assert of(aimless).would_change[0].startswith("Objectives")
    pod = FlowPod()
    pod.kv_rows = 3.0
    short = started(pod, seconds=400)
    assert of(short).limit.what == "kv"  # type: ignore[union-attr]
    assert any("waits for slots" in s for s in of(short).would_change)
    unread = explain(None, PodView("p", "x", None, ()), SPEC, 0.0, None, None)
    assert unread.limit is None and "none is at hand" in unread.would_change[0]

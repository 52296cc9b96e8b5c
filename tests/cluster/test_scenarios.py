"""The long scenarios (`make e2e`): tuned and untuned in turns, a cut, a pod short of KV memory, an upgrade of the chart."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_kit import (
    MIX,
    ROOT,
    SYSTEM,
    Deployment,
    batch_moves,
    declare,
    eventually,
    get,
    goodput,
    helm_values,
    measured,
    phase,
    plant_of,
    run,
)

from weir_bench.arrivals import Mix
from weir_bench.goodput import Objectives, quantile
from weir_bench.sizing import capacity, interval

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SHORT_QUEUE = {"maxQueueDepth": {"initial": 2}}


async def test_tuned_beats_boot_values_in_turns_and_by_the_batch_not_the_queue_alone(
    release: str, namespace: str, tmp_path: Path,
) -> None:
    async with Deployment(namespace, {"tuning": {"mode": "Advise", "knobs": SHORT_QUEUE}}) as deployment:
        await deployment.ready()
        sizing = await measured(deployment)
        await declare(deployment, sizing.objectives)
        turns = {"Advise": [], "Auto": []}
        tuned: dict[str, int] = {}
        for mode, seconds in (("Advise", 90), ("Auto", 240), ("Advise", 90), ("Auto", 240)):
            report = await phase(deployment, mode, seconds, sizing.rate, sizing.objectives, tmp_path)
            turns[mode].append(goodput(report, sizing.objectives, since=seconds / 3))
            tuned = (await deployment.control("state"))["effective"] if mode == "Auto" else tuned
        assert min(turns["Auto"]) > max(turns["Advise"]), turns
        assert batch_moves(deployment.history())

        deployment.patch({"tuning": {"knobs": {"maxQueueDepth": {"initial": tuned["max_queue_depth"]}}}})
        deployment.patch({"tuning": {"mode": "Advise"}})

        async def queue_alone() -> bool:
            return (await deployment.control("state"))["effective"]["max_queue_depth"] == tuned["max_queue_depth"]

        await eventually(queue_alone, "the boot batch with the tuned queue depth")
        report = await phase(deployment, "Advise", 240, sizing.rate, sizing.objectives, tmp_path)
        alone = goodput(report, sizing.objectives, since=80)
        assert turns["Auto"][-1] >= 1.15 * alone, f"tuned {turns['Auto'][-1]:.0%}, with the tuned queue depth alone {alone:.0%}"


async def test_a_batch_that_is_too_large_is_cut(release: str, namespace: str, tmp_path: Path) -> None:
    """Sixteen rows at boot, and an objective that only five can meet."""
    knobs = {"maxBatchSize": {"initial": 16}, **SHORT_QUEUE}
    limits = {"engine": {"limits": {"maxBatchSize": 32}}, "tuning": {"mode": "Advise", "knobs": knobs}}
    async with Deployment(namespace, limits) as deployment:
        await deployment.ready()
        plant = await plant_of(deployment)
        objectives = Objectives(ttft=max(2.0, 25 * interval(plant, MIX, 5)), tpot=round(1.05 * interval(plant, MIX, 5), 3))
        await declare(deployment, objectives)
        rate = 1.4 * capacity(plant, MIX, 5)
        before = goodput(await phase(deployment, "Advise", 90, rate, objectives, tmp_path), objectives, since=30)
        after = goodput(await phase(deployment, "Auto", 240, rate, objectives, tmp_path), objectives, since=80)
        effective = (await deployment.control("state"))["effective"]
        assert effective["max_batch_size"] < 16, effective
        assert after > before, f"cut {after:.0%}, at boot values {before:.0%}"


async def test_short_of_kv_the_batch_is_not_raised(release: str, namespace: str, tmp_path: Path) -> None:
    """Memory for about three rows, each within its time per token, and plenty of 503s: more slots would win nothing."""
    mix = Mix(prompt=256, output=64, cv=0.2)
    spec = {
        "model": {"maxModelLen": 640}, "engine": {"limits": {"kvCache": "46Mi"}},
        "tuning": {"mode": "Auto", "knobs": {"maxBatchSize": {"initial": 8}, **SHORT_QUEUE}},
    }
    async with Deployment(namespace, spec) as deployment:
        await deployment.ready()
        plant = await plant_of(deployment)
        objectives = Objectives(ttft=max(4.0, 60 * interval(plant, mix, 3)), tpot=round(2.5 * interval(plant, mix, 3), 3))
        await declare(deployment, objectives)
        report = await phase(deployment, "Auto", 240, 2 * capacity(plant, mix, 3), objectives, tmp_path, mix)
        refused = (await deployment.control("window"))["refused"]["queue_full"]
        tpot = quantile([o.tpot for o in report.outcomes if o.tpot is not None], 0.95)
        assert refused["kv"] >= 20 and refused["kv"] > 4 * refused.get("slots", 0), refused
        assert tpot is not None and tpot <= objectives.tpot
        raised = [h for h in batch_moves(deployment.history()) if h["changes"]["max_batch_size"][1] > 8]
        assert not raised and (await deployment.control("state"))["effective"]["max_batch_size"] <= 8, raised


async def test_an_upgrade_of_the_chart_restarts_no_pod_that_serves(release: str, namespace: str) -> None:
    async with Deployment(namespace) as deployment:
        await deployment.ready()
        pod, fence = deployment.pod()["metadata"]["uid"], (await deployment.control("state"))["fence"]
        values = helm_values(**{"tuner.tickSeconds": "12"})
        run("helm", "upgrade", release, str(ROOT / "charts" / "weir"), "-n", SYSTEM, "--wait", "--timeout=120s", *values)
        operators = get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")["items"]
        assert any("--tick-seconds=12" in p["spec"]["containers"][0]["args"] for p in operators)

        async def steered() -> bool:
            await deployment.completion()
            return (await deployment.control("state"))["fence"]["epoch"] > fence["epoch"]

        await eventually(steered, "the new operator steers the old pod", 120)
        assert deployment.pod()["metadata"]["uid"] == pod


async def test_helm_test_serves_one_completion_and_leaves_nothing(release: str) -> None:
    said = run("helm", "test", release, "-n", SYSTEM, "--logs", "--timeout=300s", seconds=330)
    assert "a completion from http://" in said, said

    def gone() -> bool:
        names = [o["metadata"]["name"] for kind in ("infd", "pods") for o in get(kind, "-n", SYSTEM)["items"]]
        return not [name for name in names if name.endswith("-test")]

    await eventually(gone, "what helm test made is gone")

"""Twenty minutes on a cluster under one load (`make e2e`): the tuner watches, acts, watches, acts; then settings that stay.

WEIR_TRACE names a recorded trace, whose rows are scaled to the pod; without it arrivals are drawn. WEIR_RESULTS names a folder
for the raw figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import MIX, Deployment, declare, plant_of

from weir_bench import results
from weir_bench.arrivals import Arrival, schedule
from weir_bench.live import by_mode, in_last, mix_of, play, staying, trace_rows, verdict
from weir_bench.sizing import BATCH, OVERLOAD, capacity, size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MINUTES, GRID_SECONDS = float(os.environ.get("WEIR_LIVE_MINUTES", "20")), 90.0


async def test_acting_beats_watching_each_time_and_comes_near_the_best_that_stays(
    release: str, namespace: str, tmp_path: Path,
) -> None:
    trace = os.environ.get("WEIR_TRACE")

    def rows(rate: float, seconds: float) -> list[Arrival]:
        return trace_rows(Path(trace), rate, seconds) if trace else schedule(rate, seconds, MIX, 1)

    boot = {"maxBatchSize": {"initial": BATCH}, "maxQueueDepth": {"initial": 2}}
    async with Deployment(namespace, {"tuning": {"mode": "Advise", "knobs": boot}}) as deployment:
        await deployment.ready()
        plant = await plant_of(deployment)
        objectives = size(plant, MIX).objectives
        await declare(deployment, objectives)
        rate = OVERLOAD * capacity(plant, mix_of(rows(1.0, 600.0)), BATCH)

        async def patch(spec: dict[str, Any]) -> None:
            deployment.patch(spec)

        async def state() -> Mapping[str, Any]:
            return dict((await deployment.control("state"))["effective"])

        plan, whole = by_mode(MINUTES), rows(rate, 60 * MINUTES)
        turns, report = await play(deployment.url, patch, state, plan, whole, objectives, tmp_path)
        oracle, same = [], in_last(whole, plan, GRID_SECONDS)
        for one in staying(turns[-1].knobs, GRID_SECONDS):
            found, _ = await play(deployment.url, patch, state, [one], same, objectives, tmp_path)
            oracle += found
        history = deployment.history()
    said = verdict(turns, oracle)
    figures = {"trace": trace and Path(trace).name, "rate": rate, "objectives": asdict(objectives), "verdict": said,
               "turns": [asdict(t) for t in turns], "static": [asdict(f) for f in oracle], "history": history}
    print(results.write("live-cluster", figures, Path(os.environ.get("WEIR_RESULTS", tmp_path))), said)
    assert not [o.error for o in report.outcomes if o.broken]
    assert min(said["auto"]) > max(said["advise"]), said

"""One `contract.Window`: the engine's totals, the parent's observations and the knobs, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from weir_server.contract import BOUNDS, STEP_PRODUCTS, STEP_SUMS, Knobs, Window
from weir_server.http.gate import Load
from weir_server.http.knobs import KnobBoard
from weir_server.http.observe import Observations
from weir_server.link.messages import Stats


def build_window(
    now: float, board: KnobBoard, effective: Knobs, load: Load, stats: Stats, seen: Observations,
    oldest_arrival: float | None, memory_used: int, memory_limit: int | None,
) -> Window:  # fmt: skip
    """`load`: the parent's present count of rows; `oldest_arrival`: monotonic, of what waits; memory in bytes of the pod."""
    return Window(
        instance=board.instance, monotonic=now, settled_at=seen.settled_at,
        target=board.target, effective=effective, envelope=board.envelope, draining=board.draining,
        running=load.running, prefilling=min(stats.prefilling, load.running), waiting=load.waiting,
        oldest_wait=0.0 if oldest_arrival is None else max(0.0, now - oldest_arrival), bound=load.bound,
        memory_used=memory_used, memory_limit=memory_limit, kv_used_bytes=stats.kv_used_bytes,
        decoding_seconds=stats.decoding_seconds, running_seconds=stats.running_seconds, waiting_seconds=stats.waiting_seconds,
        head_wait_seconds=_whole(stats.head_wait_seconds, BOUNDS), kv_used_byte_seconds=stats.kv_used_byte_seconds,
        step=_whole(stats.step, STEP_SUMS), decode_only=_whole(stats.decode_only, STEP_SUMS),
        products=_whole(stats.products, STEP_PRODUCTS), recompute_seconds=stats.recompute_seconds,
        queued=seen.queued, retried=seen.retried, admitted=seen.admitted,
        refused={reason: dict(bounds) for reason, bounds in seen.refused.items()}, finished=dict(seen.finished),
        preempted=stats.preempted, recomputed_tokens=stats.recomputed_tokens,
        prompt_tokens=seen.prompt_tokens, cached_tokens=seen.cached_tokens, generated_tokens=seen.generated_tokens,
        slo_good=dict(seen.slo_good), slo_total=seen.slo_total, histograms=seen.histograms, settled=seen.settled,
    )  # fmt: skip


def _whole(totals: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Every name of the contract; what the engine never had to add up is truly 0."""
    return {name: totals.get(name, 0.0) for name in names}

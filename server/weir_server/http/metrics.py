"""Prometheus families, made at scrape time from the book, the observations and the engine's totals. Names live here only.

Every series exists from the start at 0. `weir_request_prompt_tokens` and `weir_request_generation_tokens` are the two
histograms of tokens per request; the plain names are taken by the counters, and OpenMetrics wants one family for one name.
The `vllm:` set has vLLM's names, labels and buckets (vllm/v1/metrics/loggers.py), so that dashboards, autoscalers and
endpoint pickers made for it work here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest as text_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weir_server.contract import BOUNDS, KNOBS, SLOS
from weir_server.http.observe import Buckets
from weir_server.http.service import Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREEMPTION_CAUSES = ("kv", "priority", "slots")
INVARIANTS = tuple(f"I{i}" for i in range(1, 10))
VLLM_REASONS = {
    "stop": ("stop",), "length": ("length",), "abort": ("cancelled", "handed_back"), "error": ("error",), "repetition": (),
}  # fmt: skip
"""vLLM's finished_reason → ours."""
ENGINE_COUNTERS = (
    ("preempted_tokens", "Computed tokens that preemptions gave up.", "preempted_tokens"),
    ("soft_resets", "Preemptions after which a row is computed again.", "soft_resets"),
    ("offloads", "Preemptions that moved a row's KV to the swap pool.", "offloads"),
    ("restored_tokens", "Tokens whose KV came back from the swap pool.", "restored_tokens"),
    ("recomputed_tokens", "Tokens that were computed again.", "recomputed_tokens"),
    ("head_bypasses", "Rows admitted past a head of the queue that did not fit.", "bypassed"),
    ("lane_promotions", "Lanes that rows rose by waiting.", "promoted"),
    ("prefill_grants", "Steps that reserved a share for a parked prefill.", "prefill_grants"),
    ("batched_prefills", "Steps that prefilled more than one prompt.", "batched_prefills"),
    ("deadlines_exceeded", "Rows that their request's timeout ended.", "deadlines_exceeded"),
    ("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found.", "prefix_hits"),
    ("prefix_cache_evictions", "Cached blocks given up for new ones.", "prefix_evictions"),
    ("prefix_cache_adopted_evictions", "Those of them that a waiting row had counted on.", "adopted_evictions"),
)
"""(family, help, field of link.messages.Stats)."""
ENGINE_GAUGES = (
    ("kv_stranded_bytes", "KV memory that is free to one attention type alone.", "kv_stranded_bytes"),
    ("swap_used_bytes", "KV of rows that wait in the swap pool.", "swap_used_bytes"),
)


class WeirCollector(Collector):
    """Reads one Service. Registered in a registry of its own, so nothing of the process leaks in."""

    def __init__(self, service: Service) -> None:
        self.s = service

    def collect(self) -> Iterator[Metric]:
        yield from self.counters()
        yield from self.gauges()
        yield from self.latencies()
        yield from self.vllm()

    def counters(self) -> Iterator[Metric]:
        seen, stats = self.s.seen, self.s.book.stats
        refused = {(r, b): n for r, bounds in seen.refused.items() for b, n in bounds.items()}
        causes = {(c,): stats.preemptions_by_cause.get(c, 0) for c in {*PREEMPTION_CAUSES, *stats.preemptions_by_cause}}
        broken = {(i,): stats.invariant_violations.get(i, 0) for i in {*INVARIANTS, *stats.invariant_violations}}
        step = stats.step.get
        yield _counter("weir_requests_queued", "Rows accepted into the queue.", seen.queued)
        yield _counter("weir_requests_admitted", "Rows taken from the queue into the batch.", seen.admitted)
        yield _counters("weir_requests_rejected", "Rows refused.", ("reason", "bound"), refused)
        yield _counters("weir_requests_finished", "Rows that ended.", ("reason",), {(r,): n for r, n in seen.finished.items()})
        yield _counters("weir_preemptions", "Rows sent back from the batch to the queue.", ("cause",), causes)
        for name, text, field in ENGINE_COUNTERS:
            yield _counter(f"weir_{name}", text, getattr(stats, field))
        for name in ("spec_decode_drafted", "spec_decode_accepted"):
            yield _counter(f"weir_{name}", "Always 0: this version does not speculate.", 0)
        yield _counter("weir_prompt_tokens", "Prompt tokens of admitted rows.", seen.prompt_tokens)
        yield _counter("weir_prompt_tokens_cached", "Prompt tokens found in the prefix cache.", seen.cached_tokens)
        yield _counter("weir_generation_tokens", "Tokens generated for clients.", seen.generated_tokens)
        yield _counter("weir_engine_steps", "Forward passes.", step("steps", 0))
        yield _counter("weir_engine_step_seconds", "Time in steps.", step("step_seconds", 0))
        yield _counter("weir_engine_step_decode_seqs", "Decoding rows, summed over steps.", step("decode_rows", 0))
        yield _counter("weir_engine_step_context_tokens", "Context read by decoding rows.", step("context_tokens", 0))
        yield _counter("weir_engine_step_prefill_tokens", "Prompt tokens computed.", step("prefill_tokens", 0))
        yield _counter("weir_kv_usage_seconds", "Integral of the share of the KV pool held by rows.", self._kv_seconds())
        good = {(s, str(g)): n[s] for g, (n, _) in seen.by_generation.items() for s in SLOS}
        total = {(s, str(g)): t[0] for g, (_, t) in seen.by_generation.items() for s in SLOS}
        yield _counters("weir_slo_good", "Finished rows that met the objective.", ("slo", "slo_generation"), good)
        yield _counters("weir_slo", "Finished rows held against the objective.", ("slo", "slo_generation"), total)
        yield _counter("weir_lease_expirations", "Leases that ended by time.", self.s.board.expirations)
        yield _counters("weir_invariant_violations", "Broken invariants seen while running.", ("invariant",), broken)

    def gauges(self) -> Iterator[Metric]:
        s, stats, load = self.s, self.s.book.stats, self.s.book.load
        oldest = s.book.oldest_arrival
        yield _gauge("weir_requests_running", "Rows in the batch.", load.running)
        yield _gauge("weir_requests_waiting", "Rows waiting for admission.", load.waiting)
        waiting = {(b,): load.waiting if load.bound == b else 0 for b in BOUNDS}
        yield _gauges("weir_requests_waiting_by_bound", "Rows waiting, by what the head waits for.", ("bound",), waiting)
        age = max(0.0, s.now() - oldest) if oldest is not None and load.waiting else 0.0
        yield _gauge("weir_oldest_waiting_age_seconds", "Age of the oldest waiting row.", age)
        yield _gauge("weir_kv_usage_ratio", "Share of the KV pool held by rows.", self._kv_ratio())
        blocks = {("used",): stats.kv_blocks_used, ("cached",): stats.kv_blocks_cached, ("free",): s.free_chunks}
        text = "KV memory in chunks, each one block where the model has one attention type."
        yield _gauges("weir_kv_blocks", text, ("state",), blocks)
        kv = {("used",): stats.kv_used_bytes, ("cached",): stats.kv_cached_bytes, ("resident",): stats.kv_resident_bytes}
        yield _gauges("weir_kv_bytes", "KV memory: held by rows, cached prefixes, in RAM.", ("state",), kv)
        yield _gauge("weir_swap_pool_bytes", "Size of the swap pool.", s.ready.swap_bytes)
        for name, text, field in ENGINE_GAUGES:
            yield _gauge(f"weir_{name}", text, getattr(stats, field))
        for name, knobs in (("target", s.board.target), ("effective", s.effective)):
            values = {(k,): v for k in KNOBS if (v := getattr(knobs, k)) is not None}
            yield _gauges(f"weir_knob_{name}", f"The {name} value of a knob.", ("knob",), values)
        pairs = {k: pair for k in KNOBS if (pair := getattr(s.board.envelope, k)) is not None}
        bounds = {(k, b): pair[i] for k, pair in pairs.items() for i, b in enumerate(("min", "max"))}
        yield _gauges("weir_envelope", "Bounds of the knobs.", ("knob", "bound"), bounds)
        if s.memory_limit is not None:
            yield _gauge("weir_memory_limit_bytes", "The cgroup's limit.", s.memory_limit)
        yield _gauge("weir_memory_used_bytes", "Memory of both processes without file pages.", s.memory_used())
        yield _gauge("weir_process_start_time_seconds", "Unix time of the start.", s.started.timestamp())
        info = {(version("weir"), s.model.name): 1}
        yield _gauges("weir_build_info", "Version and model.", ("version", "model_name"), info)

    def latencies(self) -> Iterator[Metric]:
        b = self.s.seen.buckets
        for name, key, text in (
            ("time_to_first_token_seconds", "ttft", "Arrival to first token."),
            ("time_per_output_token_seconds", "tpot", "Mean time between tokens of a finished row."),
            ("decode_interval_seconds", "decode_interval", "Mean time between the last 64 tokens of running rows."),
            ("inter_token_latency_seconds", "itl", "Time between tokens."),
            ("queue_time_seconds", "queue_time", "Arrival to admission."),
            ("e2e_request_latency_seconds", "e2e", "Arrival to the end of a row."),
            ("request_prompt_tokens", "prompt_tokens", "Prompt tokens of admitted rows."),
            ("request_generation_tokens", "generation_tokens", "Tokens that a row generated."),
        ):
            yield _histogram(f"weir_{name}", text, {}, b[key])

    def vllm(self) -> Iterator[Metric]:
        seen, stats, load = self.s.seen, self.s.book.stats, self.s.book.load
        labels = {"model_name": self.s.model.name, "engine": "0"}
        for name, text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", load.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", self._kv_ratio()),
        ):
            yield _gauges(f"vllm:{name}", text, tuple(labels), {tuple(labels.values()): value})
        g, usable = self.s.ready.geometry, self.s.ready.usable_blocks
        config = {**labels, "block_size": str(g.block_tokens), "num_gpu_blocks": str(usable)}
        yield _gauges("vllm:cache_config_info", "Information of the KV cache.", tuple(config), {tuple(config.values()): 1})
        for name, text, value in (
            ("num_preemptions", "Cumulative number of preemptions.", stats.preempted),
            ("prompt_tokens", "Number of prefill tokens processed.", seen.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", seen.generated_tokens),
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_hits),
        ):
            yield _counters(f"vllm:{name}", text, tuple(labels), {tuple(labels.values()): value})
        ended = {(*labels.values(), v): sum(seen.finished[r] for r in ours) for v, ours in VLLM_REASONS.items()}
        yield _counters("vllm:request_success", "Count of finished requests.", (*labels, "finished_reason"), ended)
        for name, buckets, text in (
            ("time_to_first_token_seconds", seen.plain["ttft"], "Time to first token."),
            ("inter_token_latency_seconds", seen.plain["itl"], "Inter-token latency."),
            ("request_time_per_output_token_seconds", seen.plain["tpot"], "Time per output token of a request."),
            ("e2e_request_latency_seconds", seen.buckets["e2e"], "End to end request latency."),
            ("request_queue_time_seconds", seen.buckets["queue_time"], "Time spent in the queue."),
        ):
            yield _histogram(f"vllm:{name}", text, labels, buckets)

    def _pool_bytes(self) -> int:
        return max(1, self.s.ready.usable_blocks * self.s.ready.geometry.chunk_bytes)

    def _kv_ratio(self) -> float:
        return min(1.0, self.s.book.stats.kv_used_bytes / self._pool_bytes())

    def _kv_seconds(self) -> float:
        return self.s.book.stats.kv_used_byte_seconds / self._pool_bytes()


def registry_of(service: Service) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(WeirCollector(service))
    return registry


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The exposition and its content type: OpenMetrics where it is asked for, else the text format.

    Every name of ours is a plain one, so nothing is to be escaped (the library's own default writes `vllm:` as `vllm_`).
    """
    if "application/openmetrics-text" in accept:
        return openmetrics_latest(registry, escaping=ALLOWUTF8), OPENMETRICS
    return text_latest(registry, escaping=ALLOWUTF8), TEXT


Values = Mapping[Any, float]
"""Label values (a tuple) → value."""


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counters(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauges(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], b: Buckets) -> Metric:
    family = HistogramMetricFamily(name, text, labels=tuple(labels))
    total, buckets = 0, []
    for edge, n in zip([*map(floatToGoString, b.edges), "+Inf"], b.counts, strict=True):
        total += n
        buckets.append((edge, total))
    family.add_metric(tuple(labels.values()), buckets, sum_value=b.sum)
    return family

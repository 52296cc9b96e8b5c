"""The shapes both halves share: what one renders the other reads back unchanged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir_server import contract as c

KNOBS = c.Knobs(4, 1 << 30, 0.01, 32)
ENVELOPE = c.Envelope((1, 64), (1 << 20, 1 << 30), (1, 1024), (0.0, 0.5))


def window() -> c.Window:
    h = c.Histogram()
    h.observe(0.25)
    return c.Window(
        instance="i", monotonic=10.0, settled_at=1.0, target=KNOBS, effective=KNOBS, envelope=ENVELOPE, draining=False,
        running=2, prefilling=1, waiting=3, oldest_wait=0.5, bound="slots", memory_used=1, memory_limit=None, kv_used_bytes=7,
        decoding_seconds=1.0, running_seconds=2.0, waiting_seconds=3.0, head_wait_seconds=dict.fromkeys(c.BOUNDS, 0.0),
        kv_used_byte_seconds=0.0, step=dict.fromkeys(c.STEP_SUMS, 1.0), decode_only=dict.fromkeys(c.STEP_SUMS, 1.0),
        products=dict.fromkeys(c.STEP_PRODUCTS, 1.0), recompute_seconds=0.0, queued=5, retried=0, admitted=4,
        refused={"queue_full": {"slots": 1}}, finished=dict.fromkeys(c.FINISH_REASONS, 0), preempted=0, recomputed_tokens=0,
        prompt_tokens=0, cached_tokens=0, generated_tokens=0, slo_good=dict.fromkeys(c.SLOS, 0), slo_total=0,
        histograms=dict.fromkeys(c.HISTOGRAMS, h), settled={k: c.Histogram() for k in c.SETTLED_HISTOGRAMS},
    )  # fmt: skip


def test_window_survives_the_wire() -> None:
    wire = json.loads(json.dumps(window().to_wire()))
    assert c.Window.from_wire(wire) == window()


@pytest.mark.parametrize("name", ["queued", "step", "histograms", "effective"])
def test_a_window_with_a_hole_is_no_window(name: str) -> None:
    wire = window().to_wire()
    del wire[name]
    with pytest.raises(KeyError):
        c.Window.from_wire(wire)


def test_a_window_with_a_hole_inside_a_group_is_no_window() -> None:
    wire = json.loads(json.dumps(window().to_wire()))
    del wire["products"]["np"]
    with pytest.raises(KeyError):
        c.Window.from_wire(wire)


@pytest.mark.parametrize("lie", [None, "7", [1], {"a": 1}, float("nan"), float("inf"), 10**400], ids=str)
@pytest.mark.parametrize("where", [
    ("queued",), ("monotonic",), ("step", "steps"), ("products", "np"), ("finished", "stop"), ("head_wait_seconds", "kv"),
    ("refused",), ("refused", "queue_full"), ("refused", "queue_full", "slots"), ("finished",), ("histograms", "ttft"),
    ("histograms", "ttft", "counts"), ("histograms", "ttft", "first"), ("target", "max_batch_size"), ("envelope",),
], ids=".".join)
def test_what_is_no_number_makes_no_window(where: tuple[str, ...], lie: object) -> None:
    """One pod that lies is silent; its lies do not reach the law, where they would stop its neighbours' tuning."""
    wire = json.loads(json.dumps(window().to_wire()))
    group = wire
    for name in where[:-1]:
        group = group[name]
    group[where[-1]] = lie
    if (where[-1], lie) in [("finished", {"a": 1}), ("queue_full", {"a": 1}), ("counts", [1])]:
        return  # which are numbers
    with pytest.raises((KeyError, TypeError, ValueError)):
        c.Window.from_wire(wire)


@given(st.floats(1e-6, 1e5))
def test_a_value_lies_within_its_bucket(value: float) -> None:
    i = c.hist_index(value)
    assert value <= c.hist_edge(i) * (1 + 1e-9)
    assert i == 0 or value > c.hist_edge(i - 1) * (1 - 1e-9)


@given(st.lists(st.floats(1e-5, 2e3), max_size=50))
def test_histogram_survives_the_wire(values: list[float]) -> None:
    h = c.Histogram()
    for v in values:
        h.observe(v)
    buckets = [c.hist_index(v) for v in values]
    assert h.counts == [buckets.count(i) for i in range(c.HIST_EDGES + 1)]
    assert len(h.filled) == (max(buckets) - min(buckets) + 1 if values else 0), "without its empty ends"
    back = c.Histogram.from_wire(json.loads(json.dumps(h.to_wire())))
    assert back.counts == h.counts and back.filled == h.filled
    assert back.count == len(values)


def test_histogram_outside_the_edges_is_refused() -> None:
    with pytest.raises(ValueError):
        c.Histogram.from_wire({"first": c.HIST_EDGES, "counts": [1, 1], "sum": 0})


@pytest.mark.parametrize(
    ("knob", "value", "bound"),
    [("max_batch_size", 0, 1), ("max_batch_size", 65, 64), ("max_batch_size", 64, None), ("admission_watermark", 0.6, 0.5)],
)
def test_envelope_names_the_bound_that_breaks(knob: str, value: float, bound: float | None) -> None:
    assert ENVELOPE.violation(knob, value) == bound


def test_only_knobs_are_knobs() -> None:
    assert KNOBS.merged({"max_batch_size": 8}).max_batch_size == 8
    with pytest.raises(KeyError):
        KNOBS.merged({"temperature": 1})

"""A larger envelope: when the tuner proposes one, and what becomes of the proposal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from law_kit import BOOT, SPEC, FlowPod, Loop
from test_replica_count import there

from weir_operator.plan.envelope import ROLL_SECONDS, batch_limit, envelope_status
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.pin import Pinned
from weir_operator.plan.plan import parse
from weir_operator.plan.pods import pod_template
from weir_operator.plan.tuning import tuner_spec
from weir_operator.tuner.envelope import TICKS, Proposal, propose
from weir_operator.tuner.types import PodView, TunerSpec


def short(batch: int = 4, offered: float = 1.6) -> FlowPod:
    """A pod that could serve more than its envelope lets it."""
    pod = FlowPod(boot=replace(BOOT, max_batch_size=batch), offered=offered)
    pod.envelope = replace(pod.envelope, max_batch_size=(1, 4))
    return pod


def proposals(pod: FlowPod, spec: TunerSpec = SPEC, ticks: int = 2 * TICKS, **others: FlowPod) -> list[Proposal]:
    """One for each tick of a pod under the law."""
    loop, found, last = Loop(pod, spec), [Proposal()], None
    for _ in range(round(ticks * spec.tick_seconds / spec.poll_seconds)):
        decision = loop.poll()
        if decision.records and decision.records[0].t != last:
            last = decision.records[0].t
            views = {"p": PodView("p", "x", pod.control(), tuple(loop.polls))}
            views |= {n: PodView(n, "x", p.control(), ()) for n, p in others.items()}
            found.append(propose(found[-1], views, loop.state, spec, loop.now))
    return found


def test_a_batch_at_the_envelopes_end_that_would_gain_beyond_is_proposed_after_ten_ticks() -> None:
    found = proposals(short())
    assert found[-1].standing == 8
    assert all(p.standing is None for p in found[:TICKS])
    assert TICKS == 10


@pytest.mark.parametrize(("pod", "spec"), [
    (short(offered=0.3), SPEC),  # it carries what is offered
    (FlowPod(), SPEC),  # the live knob has room
    (short(), replace(SPEC, bounds={"max_batch_size": (None, 4)})),  # the user's own end
    (short(), replace(SPEC, tpot=0.058)),  # more rows at once would miss the objective
    (short(), replace(SPEC, mode="Disabled")),
    (short(), replace(SPEC, ttft=None)),
])
def test_nothing_is_proposed_where_it_would_not_help_or_not_be_wanted(pod: FlowPod, spec: TunerSpec) -> None:
    assert {p.standing for p in proposals(pod, spec)} == {None}


def test_the_users_maximum_cuts_it_and_most_pods_must_want_it() -> None:
    assert proposals(short(), replace(SPEC, bounds={"max_batch_size": (None, 6)}))[-1].standing == 6
    quiet = {name: FlowPod() for name in ("a", "b")}
    assert proposals(short(), **quiet)[-1].standing is None


def test_kv_that_binds_is_no_reason() -> None:
    pod = short()
    pod.kv_rows = 3
    assert proposals(pod)[-1].standing is None


# ---------------------------------------------------------------- what becomes of it

def resource(envelope: str = "Roll", status: Any = None, **tuning: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "uid": "u", "generation": 1},
        "spec": {
            "model": {"source": "file:///m.gguf"}, "slo": {"ttft": "1s", "tpot": "50ms"},
            "engine": {"limits": {"maxBatchSize": 8}},
            "tuning": {"envelope": envelope, "knobs": {"maxBatchSize": {"max": 8 if envelope == "Keep" else 24}}, **tuning},
        },
        "status": {"tuning": {"envelope": status}} if status else {},
    })


GROWN = {"maxBatchSize": 16, "from": 8, "since": "2026-01-01T00:00:00Z"}


def seen(rows: int | None, now: str = "2026-01-01T02:00:00Z", **more: Any) -> Observed:
    return replace(there(1, tuning=TuningReport({}, 1, 1, proposal=rows), **more), now=now)


@pytest.mark.parametrize(("found", "rows"), [
    (resource(), 8), (resource(status=GROWN), 16), (resource("Keep", GROWN), 8),
    (resource(status={**GROWN, "from": 4}), 8),  # the limit was edited since
    (resource(status={**GROWN, "maxBatchSize": 99}), 24),
])
def test_pods_are_started_with_what_it_has_grown_to(found: Any, rows: int) -> None:
    assert batch_limit(found) == rows
    [server] = pod_template(found, Pinned("i"))["spec"]["containers"]
    assert f"--max-requests-per-batch={rows}" in server["args"]
    assert tuner_spec(found.spec, 30, 5).bounds["max_batch_size"][1] in (8, 24)


def test_a_proposal_is_taken_up_once_an_hour_where_roll_says_so_and_nothing_else_is_under_way() -> None:
    assert envelope_status(resource(), seen(16), True) == {"maxBatchSize": 16, "from": 8, "since": "2026-01-01T02:00:00Z"}
    assert envelope_status(resource(), seen(16), False) == {}
    assert envelope_status(resource("Keep"), seen(16), True) == {}
    assert envelope_status(resource(mode="Advise"), seen(16), True) == {}
    assert envelope_status(resource(paused=True), seen(16), True) == {}
    assert envelope_status(resource(), seen(16, scalable=False), True) == {}
    assert envelope_status(resource(), seen(None), True) == {}
    assert envelope_status(resource(status=GROWN), seen(24), True)["maxBatchSize"] == 24
    assert envelope_status(resource(status=GROWN), seen(24, now="2026-01-01T00:59:59Z"), True) == GROWN
    assert ROLL_SECONDS == 3600
    assert envelope_status(resource(status=GROWN), seen(16), True) == GROWN, "it is there already"
    assert envelope_status(resource(status={**GROWN, "since": "yesterday"}), seen(24), True)["maxBatchSize"] == 24

"""One deployment under the tuner: what is remembered between polls, and how its pods' knobs are set.

The fence orders writers: `epoch` is the leader's, `seq` counts moves on a pod. A move takes the next seq; renewing a lease
repeats the last request word for word, so a pod can tell the two apart. A move counts as applied only when a later window
shows it: what a pod reports is compared with what was last asked of it at every poll.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weir_operator.api.types import InferenceDeployment
from weir_operator.io.scrape import ControlClient, Endpoint, OtherContract, Refused, Silent
from weir_operator.loops.replicas import Count
from weir_operator.plan.args import initial_knobs
from weir_operator.plan.observed import TuningReport
from weir_operator.plan.tuning import MIN_FINISHED
from weir_operator.tuner.envelope import Proposal
from weir_operator.tuner.types import Move, PodView, Poll, Record, TunerSpec, TunerState
from weir_operator.tuner.window import remember
from weir_server.contract import KNOBS, ControlState, Envelope, Knobs, KnobsRequest, Window

log = logging.getLogger(__name__)

VERIFIED_SECONDS = 600.0
"""Values that met the objectives for so long become what an expired lease returns to."""
VERIFIED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Subject:
    """One deployment to steer: its resource and the control ports of its pods. `saved`: status.tuning as last written.
    `replicas`: how many pods are wanted, None where that is not the operator's to say."""

    key: str
    resource: InferenceDeployment
    endpoints: tuple[Endpoint, ...]
    saved: Mapping[str, Any] = field(default_factory=dict)
    replicas: int | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """A resource that was made anew under the same name is another one."""
        return self.key, self.resource.metadata.uid


@dataclass(slots=True)
class Pod:
    """One server as the operator knows it."""

    polls: deque[Poll] = field(default_factory=deque)
    control: ControlState | None = None
    sent: KnobsRequest | None = None  # the last request that it accepted
    sent_at: float = 0.0
    silent: str = ""
    drift: str = ""
    other_contract: bool = False
    calm_since: tuple[float, Window] | None = None  # start of the present run of unchanged knobs, for the fallback
    fallback: dict[str, Any] = field(default_factory=dict)  # learned; empty until values were verified

    def view(self, name: str) -> PodView:
        model = self.control.model if self.control else {}
        kind = "/".join(str(model.get(k, "")) for k in ("family", "dtype", "weights", "decode_path", "isa"))
        return PodView(name, kind, self.control, tuple(self.polls))


@dataclass(slots=True)
class Steering:
    """All that is kept in memory for one deployment; what must outlive the process is in its status."""

    state: TunerState
    history: list[dict[str, Any]]
    count: Count = field(default_factory=Count)
    proposal: Proposal = field(default_factory=Proposal)
    pods: dict[str, Pod] = field(default_factory=dict)
    outcomes: dict[str, Record] = field(default_factory=dict)
    published_at: float | None = None
    published: TuningReport | None = None  # what of it is worth a write

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> Steering:
        """From a status; a state of another version is dropped, since the pods' own read-back is what counts."""
        try:
            state = TunerState.from_json(saved["state"]) if saved.get("state") else TunerState()
        except (KeyError, TypeError, ValueError, AttributeError):
            log.warning("the tuner's saved state is of another version: starting from the pods' present values")
            state = TunerState()
        return cls(state, [dict(h) for h in saved.get("history", ())], Count.resumed(saved))


def in_common(new: Window, old: Window | None) -> Window:
    """The same reading, holding in common with the one before what has not changed: of a quiet pod that is all but its clock,
    and HISTORY_SECONDS of readings are kept of every pod."""
    if old is None:
        return new
    same: dict[str, Any] = {}
    for f in fields(new):
        now, before = getattr(new, f.name), getattr(old, f.name)
        if type(now) is type(before) and now == before:
            same[f.name] = before
        elif f.name in ("histograms", "settled"):
            same[f.name] = {name: before[name] if h == before[name] else h for name, h in now.items()}
    return replace(new, **same)


async def poll(client: ControlClient, endpoint: Endpoint, pod: Pod, now: float) -> None:
    """Read one pod's window, and its state where it is not known or another process answers."""
    pod.silent, pod.drift, window = "", "", None
    try:
        if pod.control is None:
            pod.control = await client.state(endpoint)
        window = await client.window(endpoint)
        if window.instance != pod.control.instance:
            pod.control, pod.sent, pod.calm_since, pod.fallback = await client.state(endpoint), None, None, {}
        pod.other_contract = False
        _read_back(pod, window)
    except OtherContract as e:
        pod.silent, pod.other_contract, pod.control = str(e), True, None
    except Silent as e:
        pod.silent = str(e)
    if window is not None:
        window = in_common(window, next((p.window for p in reversed(pod.polls) if p.window), None))
    remember(pod.polls, Poll(now, window))
    if window is not None:
        _verify(pod, window, now)


def _read_back(pod: Pod, window: Window) -> None:
    """Compare what the pod says with what was last asked of it. After a mismatch its own values are the truth."""
    if pod.sent is None or not pod.sent.knobs:
        return
    target, chunk = _by_knob(window.target), pod.control.kv.chunk_bytes if pod.control else 1
    wrong = {
        knob: (want, target[knob])
        for knob, want in pod.sent.knobs.items()
        if (abs((target[knob] or 0) - want) >= chunk if knob == "kv_cache_budget" else target[knob] != want)
    }
    pod.drift = "; ".join(f"{knob} was set to {want} and reads {is_}" for knob, (want, is_) in sorted(wrong.items()))
    if wrong and pod.control is not None:
        pod.sent = None
        pod.control = replace(pod.control, target=window.target, effective=window.effective)


def _verify(pod: Pod, window: Window, now: float) -> None:
    """Keep as fallback the knobs that stood unchanged and met the objectives for VERIFIED_SECONDS."""
    since = pod.calm_since
    if since is None or since[1].effective != window.effective or since[1].slo_total > window.slo_total:
        pod.calm_since = (now, window)
        return
    total, good = window.slo_total - since[1].slo_total, window.slo_good["both"] - since[1].slo_good["both"]
    if now - since[0] >= VERIFIED_SECONDS:
        if total >= MIN_FINISHED and good / total >= VERIFIED_SHARE:
            pod.fallback = _wire(window.effective)
        pod.calm_since = (now, window)


def _wire(knobs: Knobs) -> dict[str, Any]:
    return {name: value for name, value in _by_knob(knobs).items() if value is not None}


def _by_knob(values: Knobs | Envelope) -> dict[str, Any]:
    """Not `asdict`: it copies deeply, and this runs several times at every poll of every pod."""
    return {name: getattr(values, name) for name in KNOBS}


def request_for(
    pod: Pod, spec: TunerSpec, resource: InferenceDeployment, move: Move | None, epoch: int, lease_seconds: float, now: float,
) -> KnobsRequest | None:
    """What to ask of the pod now, or None where nothing is due.

    Auto, paused or not, holds a lease on the pod's values; Advise and Disabled give it back, with the declared start values
    as fallback, so that declared and not learned values are in force. At first contact in Auto, a fallback that neither is
    declared nor was at boot was learned by an operator before this one, and stays.
    """
    control = pod.control
    if control is None:
        return None
    boot = _wire(control.boot)
    fallback = {**boot, **initial_knobs(resource.spec.tuning.knobs)}
    steering = spec.mode == "Auto"
    knobs: dict[str, Any] = {}
    if steering:
        fallback = _inside(spec.bounds, fallback)
        if pod.sent is None and not pod.fallback:
            pod.fallback = {k: v for k, v in _wire(control.fallback).items() if v not in (boot[k], fallback[k])}
        fallback = _inside(spec.bounds, {**fallback, **pod.fallback})
        known = pod.sent.knobs if pod.sent and pod.sent.knobs else _wire(control.target)
        knobs = {**known, **({k: _whole(k, v) for k, v in move.knobs.items()} if move else {})}
    slo = {"ttft": spec.ttft, "tpot": spec.tpot} if spec.ttft is not None and spec.tpot is not None else None
    wanted = KnobsRequest(
        instance=control.instance, epoch=epoch, seq=0, lease_seconds=lease_seconds if steering else 0.0, knobs=knobs,
        fallback=_inside(_by_knob(control.envelope), fallback), slo=slo,
    )
    if pod.sent is not None and replace(pod.sent, seq=0) == wanted:
        due = steering and now - pod.sent_at >= lease_seconds / 3
        return pod.sent if due else None
    seen = control.fence.seq if control.fence.epoch == epoch else 0
    return replace(wanted, seq=max(seen, pod.sent.seq if pod.sent and pod.sent.epoch == epoch else 0) + 1)


def _inside(bounds: Mapping[str, tuple[float | None, float | None] | None], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Values cut to bounds: one that is outside must not make the pod refuse the rest. A knob whose bounds are None goes."""
    out = {}
    for name, value in knobs.items():
        if (ends := bounds.get(name, (None, None))) is not None:
            low, high = (value if end is None else end for end in ends)
            out[name] = _whole(name, min(max(value, low), high))
    return out


def _whole(knob: str, value: float) -> float | int:
    if knob not in KNOBS:
        raise KeyError(knob)
    return value if knob == "admission_watermark" else int(value)


async def send(client: ControlClient, endpoint: Endpoint, pod: Pod, request: KnobsRequest, now: float) -> str | None:
    """Ask it; the answer is the pod's new state. Returns why it did not happen, or None where it did."""
    try:
        pod.control = await client.put_knobs(endpoint, request)
    except Refused as e:
        if e.status == 409:  # another process, or another leader was here
            pod.control, pod.sent = None, None
        elif e.status == 422:
            pod.drift = f"{endpoint.name} refuses: {e}"
        return str(e)
    except (Silent, OtherContract) as e:
        return str(e)
    pod.sent, pod.sent_at = request, now
    return None

"""Which changes of conditions are told as Events: those that a person would want to have been told, each once.

An Event is for a change: of a condition's reason, or, where the message says what the user has to mend, of its message. What
goes up and down with the traffic (Saturated, SLOMet, Moving …) is a condition and a metric, and no Event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GOOD = {("Ready", "Serving"), ("ModelLoaded", "Loaded"), ("Progressing", "Complete"), ("MetricsAvailable", "Polled"),
        ("KnobsUnsupported", "Supported")}
"""Told only where the condition was told to be bad before, but for Serving."""
BAD = {
    ("Ready", "ImagePullFailed"), ("Ready", "CrashLooping"), ("Ready", "OutOfMemory"), ("Ready", "Unschedulable"),
    ("Ready", "ConfigError"), ("Ready", "DownloadFailed"), ("Ready", "ProbeFailing"), ("Ready", "VolumeNotReady"),
    ("Ready", "SpecInvalid"), ("Ready", "ApplyRefused"), ("Ready", "NameTaken"),
    ("IntegrationsReady", "KindMissing"), ("IntegrationsReady", "Refused"),
    ("ModelLoaded", "LoadFailed"), ("Progressing", "DeadlineExceeded"), ("MetricsAvailable", "NoPodAnswers"),
    ("AutoscalerOwned", "AnotherOnDeployment"), ("AutoscalerOwned", "AnotherOnResource"),
    ("Contested", "OtherOperator"), ("KnobsUnsupported", "OtherContract"), ("Tuned", "KnobDrift"), ("Tuned", "Mispredicted"),
}
TO_MEND = {"SpecInvalid", "ApplyRefused", "NameTaken", "Refused"}
"""Their message names what is wrong: another message is other news. Others' messages name pods and counts."""


@dataclass(frozen=True, slots=True)
class News:
    reason: str
    message: str
    warning: bool


def news(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[News]:
    """What changed between two lists of conditions and is worth an Event."""
    old = {c.get("type"): c for c in before}
    told = []
    for condition in after:
        kind, reason, message = condition["type"], condition["reason"], condition["message"]
        was = old.get(kind, {})
        if was.get("reason") == reason and not (reason in TO_MEND and was.get("message") != message):
            continue
        if (kind, reason) in BAD:
            told.append(News(reason, message, True))
        elif (kind, reason) in GOOD and (reason == "Serving" or (kind, was.get("reason")) in BAD):
            told.append(News(reason, message, False))
    return told


def reference() -> str:
    """Which conditions become Events, as a section of documentation; `KnobsMoved` is told by the tuner."""
    head = """## Events

One object for each resource and reason, written on news alone; a repeat raises its count. `KnobsMoved` tells of each move of
knobs, `ScaledOut` and `ScaledIn` of each change of the number of pods by the operator, `EnvelopeGrown` of a rolling restart
with a larger batch limit (`tuning.envelope: Roll`). The others are conditions (meanings: [conditions.md](conditions.md)) at the
moment when they come to hold.

| reason | condition | type |
|---|---|---|
"""
    told = [(reason, kind, "Warning") for kind, reason in BAD] + [(reason, kind, "Normal") for kind, reason in GOOD]
    return head + "".join(f"| `{reason}` | {kind} | {word} |\n" for reason, kind, word in sorted(told))

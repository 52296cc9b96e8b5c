"""The alerts, on Prometheus' own evaluator: each fires when it should and not when it should not, and has a runbook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_kit import CHART, HELMS, ROOT, call, needed, one, render

pytestmark = pytest.mark.chart
RULES = [r for g in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for r in g["rules"]]
NAMES = [r["alert"] for r in RULES]
RUNBOOKS = ROOT / "docs/runbooks"

OPERATOR = 'namespace="weir-system", job="weir"'
CHAT = 'namespace="team", name="chat"'
POD = 'namespace="team", pod="chat-5d-x"'
BATCH = f'{POD}, knob="max_batch_size"'


def condition(kind: str, values: str) -> dict[str, str]:
    return {f'weir_resource_condition{{{CHAT}, condition="{kind}"}}': values}


def refused(values: str, reason: str = "queue_full", bound: str = "slots") -> dict[str, str]:
    return {f'weir_requests_rejected_total{{{POD}, reason="{reason}", bound="{bound}"}}': values}


QUEUED = {f"weir_requests_queued_total{{{POD}}}": "0+60x60"}
AT_THE_END = {f"weir_knob_effective{{{BATCH}}}": "64x60", f'weir_envelope{{{BATCH}, bound="max"}}': "64x60"}
BELOW = {f"weir_knob_effective{{{BATCH}}}": "32x60", f'weir_envelope{{{BATCH}, bound="max"}}': "64x60"}

FIRING: list[tuple[str, dict[str, str], dict[str, str], str]] = [
    # alert, series by minute, labels of the alert at minute 50, part of its description
    ("WeirOperatorDown", {f'weir_operator_leader{{{OPERATOR}, pod="a"}}': "0x60"},
     {"namespace": "weir-system", "job": "weir"}, "Nothing is reconciled"),
    ("WeirOperatorDown", {f'weir_operator_leader{{namespace="{n}", job="weir", pod="a"}}': v
                          for n, v in (("one", "1x60"), ("two", "0x60"))},
     {"namespace": "two", "job": "weir"}, "Nothing is reconciled"),  # of two releases
    ("WeirOperatorDown", {}, {}, "Nothing is reconciled"),
    ("WeirTwoLeaders", {f'weir_operator_leader{{{OPERATOR}, pod="{p}"}}': "1x60" for p in "ab"},
     {"namespace": "weir-system", "job": "weir"}, "2 replicas in weir-system"),
    ("WeirContested", condition("Contested", "1x60"), {}, "1 InferenceDeployments are asked for"),
    ("WeirReconcileErrors", {f'weir_operator_reconciles_total{{{OPERATOR}, pod="a", result="error"}}': "0+1x60"},
     {"namespace": "weir-system", "job": "weir"}, "passes of the operator in weir-system"),
    ("WeirQueueGrowing", {f'weir_operator_queued_keys{{{OPERATOR}, pod="a"}}': "500x60"},
     {"namespace": "weir-system", "job": "weir", "pod": "a"}, "500 resources"),
    ("WeirWatchStalled", {f'weir_operator_watch_lag_seconds{{{OPERATOR}, pod="a"}}': "0x10 0+60x50"},
     {"namespace": "weir-system", "job": "weir", "pod": "a"}, "39m 0s ago"),
    ("WeirApiErrors", {
        f'weir_operator_api_calls_total{{{OPERATOR}, pod="a", verb="get", code="200"}}': "0+60x60",
        f'weir_operator_api_calls_total{{{OPERATOR}, pod="a", verb="get", code="503"}}': "0+20x60",
    }, {"namespace": "weir-system", "job": "weir"}, "25% of the requests"),
    ("WeirTunerBlind", {f"weir_tuner_last_reading_timestamp_seconds{{{CHAT}}}": "0+60x20 1200x40"},
     {"namespace": "team", "name": "chat"}, "was last read 30m 0s ago"),
    ("WeirUnavailable", {**condition("Degraded", "1x60"), **condition("Available", "0x60")},
     {"namespace": "team", "name": "chat"}, "team/chat wants pods and none serves"),
    ("WeirDegraded", {**condition("Degraded", "1x60"), **condition("Available", "1x60")},
     {"namespace": "team", "name": "chat"}, "Fewer pods of team/chat"),
    ("WeirSLOMissed", condition("SLOMet", "0x60"), {"namespace": "team", "name": "chat"}, "requests to team/chat"),
    ("WeirRefusing", {**QUEUED, **refused("0+20x60")}, {"namespace": "team", "pod": "chat-5d-x"}, "25% of the rows"),
    ("WeirRefusing", {**QUEUED, **refused("0+20x60", "kv_budget", "kv")}, {"namespace": "team", "pod": "chat-5d-x"}, "25%"),
    ("WeirOutOfHeadroom", {**AT_THE_END, **refused("0+20x60")},
     {"namespace": "team", "pod": "chat-5d-x", "knob": "max_batch_size"}, "runs 64 rows"),
    ("WeirKnobsOscillate", {f"weir_knob_target{{{BATCH}}}": " ".join(["4 8"] * 30)},
     {"namespace": "team", "pod": "chat-5d-x"}, "times within an hour"),
    ("WeirLeaseExpired", {f"weir_lease_expirations_total{{{POD}}}": "0x40 1x20"},
     {"namespace": "team", "pod": "chat-5d-x"}, "no operator renewed it"),
    ("WeirInvariantViolated", {f'weir_invariant_violations_total{{{POD}, invariant="I3"}}': "0x40 1x20"},
     {"namespace": "team", "pod": "chat-5d-x", "invariant": "I3"}, "Invariant I3"),
    ("WeirMemoryNearLimit", {f"weir_memory_used_bytes{{{POD}}}": "97x60", f"weir_memory_limit_bytes{{{POD}}}": "100x60"},
     {"namespace": "team", "pod": "chat-5d-x"}, "uses 97% of"),
]
QUIET: list[tuple[str, dict[str, str]]] = [
    ("WeirOperatorDown", {f'weir_operator_leader{{{OPERATOR}, pod="a"}}': "0x60",
                          f'weir_operator_leader{{{OPERATOR}, pod="b"}}': "1x60"}),
    ("WeirOperatorDown", {f'weir_operator_leader{{{OPERATOR}, pod="a"}}': "1x47 0x3"}),  # a takeover
    ("WeirTwoLeaders", {f'weir_operator_leader{{namespace="{n}", job="weir", pod="a"}}': "1x60" for n in ("one", "two")}),
    ("WeirContested", condition("Contested", "0x60")),
    ("WeirReconcileErrors", {f'weir_operator_reconciles_total{{{OPERATOR}, pod="a", result="{r}"}}': v
                             for r, v in (("error", "3x60"), ("retry", "0+9x60"))}),
    ("WeirQueueGrowing", {f'weir_operator_queued_keys{{{OPERATOR}, pod="a"}}': " ".join(["900 900 0"] * 20)}),
    ("WeirWatchStalled", {f'weir_operator_watch_lag_seconds{{{OPERATOR}, pod="a"}}': "0x60"}),
    ("WeirApiErrors", {
        f'weir_operator_api_calls_total{{{OPERATOR}, pod="a", verb="apply", code="{c}"}}': v
        for c, v in (("200", "0+60x60"), ("409", "0+60x60"), ("404", "0+60x60"), ("500", "0+3x60"))
    }),
    ("WeirTunerBlind", {f"weir_tuner_last_reading_timestamp_seconds{{{CHAT}}}": "0+60x60"}),
    ("WeirTunerBlind", {f'weir_tuner_last_reading_timestamp_seconds{{{CHAT}, pod="{p}"}}': v
                        for p, v in (("old-leader", "0x60"), ("leader", "0+60x60"))}),
    ("WeirUnavailable", {**condition("Degraded", "0x60"), **condition("Available", "0x60")}),  # scaled to zero
    ("WeirUnavailable", {**condition("Degraded", "1x60"), **condition("Available", "1x60")}),
    ("WeirDegraded", {**condition("Degraded", "0x60"), **condition("Available", "1x60")}),
    ("WeirSLOMissed", {}),  # unknown is absent
    ("WeirSLOMissed", condition("SLOMet", "0 1 0 1 " * 15)),
    ("WeirRefusing", {**QUEUED, **refused("0+1x60")}),
    ("WeirRefusing", {**QUEUED, **refused("0+20x60", "draining", "drain")}),
    ("WeirOutOfHeadroom", {**BELOW, **refused("0+20x60")}),
    ("WeirOutOfHeadroom", {**AT_THE_END, **refused("0+20x60", bound="kv")}),
    ("WeirKnobsOscillate", {f"weir_knob_target{{{BATCH}}}": "4x30 8x30"}),
    ("WeirLeaseExpired", {f"weir_lease_expirations_total{{{POD}}}": "3x60"}),
    ("WeirInvariantViolated", {f'weir_invariant_violations_total{{{POD}, invariant="I3"}}': "0x60"}),
    ("WeirMemoryNearLimit", {f"weir_memory_used_bytes{{{POD}}}": "97x60"}),  # without a limit
]


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """The PrometheusRule of the chart."""
    return one(render(HELMS[0] if HELMS else needed("helm"), "--set=metrics.prometheusRule.enabled=true"), "PrometheusRule")


def promtool(folder: Path, rules: dict[str, Any], *cases: dict[str, Any]) -> None:
    """Fails with promtool's own account of what it expected and what it got."""
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": rules["spec"]["groups"]}))
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": list(cases)}
    (folder / "test.yaml").write_text(yaml.safe_dump(tests))
    done = call(needed("promtool"), "test", "rules", str(folder / "test.yaml"), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def case(name: str, series: dict[str, str], alerts: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = [{"series": k, "values": v.strip()} for k, v in series.items()]
    return {"interval": "1m", "input_series": inputs,
            "alert_rule_test": [{"alertname": name, "eval_time": "50m", "exp_alerts": alerts}]}


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert sorted(NAMES) == sorted({name for name, *_ in FIRING}) == sorted({name for name, _ in QUIET})


@pytest.mark.parametrize(("name", "series", "labels", "part"), FIRING, ids=[f"{i}-{f[0]}" for i, f in enumerate(FIRING)])
def test_it_fires(
    rendered: dict[str, Any], tmp_path: Path, name: str, series: dict[str, str], labels: dict[str, str], part: str,
) -> None:
    """promtool is told that nothing fires, and its complaint says what did: it wants annotations to the letter otherwise."""
    rule = next(r for r in RULES if r["alert"] == name)
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": rendered["spec"]["groups"]}))
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [case(name, series, [])]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    done = call(needed("promtool"), "test", "rules", str(tmp_path / "test.yaml"), check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0, f"{name} does not fire"
    got = said[said.index("got:"):]
    for key, value in {**labels, **rule["labels"]}.items():
        assert f'{key}="{value}"' in got, got
    assert part in got, got
    assert f"docs/runbooks/{name}.md" in got


@pytest.mark.parametrize(("name", "series"), QUIET, ids=[f"{i}-{q[0]}" for i, q in enumerate(QUIET)])
def test_it_stays_quiet(rendered: dict[str, Any], tmp_path: Path, name: str, series: dict[str, str]) -> None:
    promtool(tmp_path, rendered, case(name, series, []))


def test_the_rules_are_valid_and_carry_what_the_values_add(tmp_path: Path) -> None:
    helm = HELMS[0] if HELMS else needed("helm")
    values = ("--set=metrics.prometheusRule.enabled=true", "--set=metrics.prometheusRule.alertLabels.team=serving",
              "--set=metrics.prometheusRule.runbookBase=https://git.example/runbooks/")
    rules = one(render(helm, *values), "PrometheusRule")
    for rule in (r for g in rules["spec"]["groups"] for r in g["rules"]):
        assert rule["labels"]["team"] == "serving" and rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook_url"] == f"https://git.example/runbooks/{rule['alert']}.md"
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump({"groups": rules["spec"]["groups"]}))
    call(needed("promtool"), "check", "rules", str(file))


def test_each_alert_has_a_runbook_and_no_runbook_lacks_its_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("Weir*.md")}
    assert pages == set(NAMES)
    for name in NAMES:
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        for heading in ("## Meaning", "## Look", "## Do"):
            assert heading in text, f"{name}: {heading}"

"""Dashboards and alerts speak of metrics that are really exported, with labels that they really have."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_kit import CHART, HELMS, ROOT, call, needed, one, render

sys.path.insert(0, str(ROOT / "tests" / "unit"))
pytestmark = pytest.mark.chart
FILES = sorted((CHART / "files/dashboards").glob("*.json"))
SCRAPED = {"namespace", "pod", "job", "instance", "container", "le"}
"""Labels that a scrape adds, and the buckets' own."""


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for mark in board["annotations"]["list"]:
        yield mark["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def used() -> list[tuple[str, str]]:
    """(where, PromQL)."""
    found = [(file.stem, e) for file in FILES for e in expressions(json.loads(file.read_text()))]
    alerts = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    return found + [(r["alert"], r["expr"]) for g in alerts["groups"] for r in g["rules"]]


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that are matched) of each series that an expression names."""
    for name, matchers in re.findall(r"\b((?:weir|vllm)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?", expr):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers))


async def exposition() -> str:
    """Of a real server."""
    from http_kit import serving

    from weir_server.http.metrics import registry_of, render

    async with serving() as kit:
        return render(registry_of(kit.service), "")[0].decode()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name → labels, of a real server's exposition and of the operator's catalogue."""
    from prometheus_client.parser import text_string_to_metric_families

    from weir_operator.io.metrics import catalogue

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(asyncio.run(exposition())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for name, kind, labels, _ in catalogue():
        for part in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + part] = {*labels, *(["le"] if part == "_bucket" else [])}
    found["weir_memory_limit_bytes"] = set()  # where there is a limit
    return found


def test_every_metric_and_label_that_is_asked_for_is_exported(exported: dict[str, set[str]]) -> None:
    asked = {(where, name): labels for where, expr in used() for name, labels in selectors(expr)}
    assert len(asked) > 60
    for (where, name), labels in asked.items():
        assert name in exported, f"{where} asks for {name}"
        assert labels <= exported[name] | SCRAPED, f"{where}: {name} has no label {labels - exported[name] - SCRAPED}"


def test_labels_that_series_are_summed_by_exist(exported: dict[str, set[str]]) -> None:
    for where, expr in used():
        for by, inner in re.findall(r"by \(([^)]*)\) \((.*)", expr):
            known = SCRAPED.union(*(exported[name] for name, _ in selectors(inner) if name in exported))
            assert {label.strip() for label in by.split(",")} <= known, f"{where}: {expr}"


def test_every_expression_is_promql(tmp_path: Path) -> None:
    """Variables stand for what Grafana puts in their place."""
    stand_ins = {"$namespace": "team", "$name": "chat", "$__rate_interval": "5m", "$datasource": "p"}
    rules = []
    for i, (_where, expr) in enumerate(used()):
        if expr.startswith("label_values("):
            expr = re.sub(r"^label_values\((.*), \w+\)$", r"\1", expr)
        for variable, value in stand_ins.items():
            expr = expr.replace(variable, value)
        rules.append({"record": f"r{i}", "expr": expr})
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    call(needed("promtool"), "check", "rules", str(file))


def test_the_rules_of_the_page_on_autoscaling_are_prometheus_rules(tmp_path: Path) -> None:
    page = (ROOT / "docs/autoscaling.md").read_text()
    [rules] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if text.startswith("groups:")]
    (tmp_path / "rules.yaml").write_text(rules)
    call(needed("promtool"), "check", "rules", str(tmp_path / "rules.yaml"))
    queries = re.findall(r"query: '(.*)'", page)
    assert len(queries) == 2
    recorded = [{"record": f"r{i}", "expr": query} for i, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]}))
    call(needed("promtool"), "check", "rules", str(tmp_path / "queries.yaml"))


def test_the_dashboards_show_what_they_promise() -> None:
    boards = {file.stem: json.loads(file.read_text()) for file in FILES}
    assert set(boards) == {"fleet", "deployment"}
    text = "\n".join(expressions(boards["deployment"]))
    for family in ("weir_requests_waiting_by_bound", "weir_requests_rejected_total", "weir_knob_effective", "weir_envelope"):
        assert family in text
    assert "reason, bound" in text
    [mark] = boards["deployment"]["annotations"]["list"]
    assert "changes(weir_knob_target" in mark["expr"]
    for board in boards.values():
        spots = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(set(spots)) == len(spots)
        assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
        assert len({p["id"] for p in board["panels"]}) == len(spots)


def test_they_come_as_config_maps_for_grafanas_sidecar() -> None:
    helm = HELMS[0] if HELMS else needed("helm")
    maps = [m for m in render(helm, "--set=metrics.dashboards.enabled=true") if m["kind"] == "ConfigMap"]
    assert {name for m in maps for name in m["data"]} == {file.name for file in FILES}
    for m in maps:
        assert m["metadata"]["labels"]["grafana_dashboard"] == "1"
        [(name, text)] = m["data"].items()
        assert json.loads(text) == json.loads((CHART / "files/dashboards" / name).read_text())


def test_the_operators_labels_are_kept_when_it_is_scraped() -> None:
    """Its series have `namespace` and `name` of resources: without honorLabels a scrape calls them exported_namespace."""
    helm = HELMS[0] if HELMS else needed("helm")
    monitor = one(render(helm, "--set=metrics.serviceMonitor.enabled=true"), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True
    pods = one(render(helm, "--set=metrics.podMonitor.enabled=true,metrics.service.enabled=false"), "PodMonitor")
    assert pods["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True

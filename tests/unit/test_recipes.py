"""docs/autoscaling.md: every family that its recipes ask for exists, and so does every field that they lean on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from weir_operator.io import metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/autoscaling.md").read_text()


def blocks() -> list[Any]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_every_metric_is_one_that_somebody_exports() -> None:
    asked = set(re.findall(r"\bweir_[a-z_]+", PAGE)) - {"weir_operator"}
    servers = set(re.findall(r"^\| `(weir_[a-z_]+)`", (ROOT / "docs/server.md").read_text(), re.MULTILINE))
    ours = {name for name, *_ in metrics.catalogue()}
    assert len(asked) >= 4 and asked <= servers | ours, asked - servers - ours


def test_the_labels_that_are_matched_are_there() -> None:
    labels = {name: set(labels) for name, _, labels, _ in metrics.catalogue()}
    assert {"namespace", "name"} == labels["weir_tuner_load_ratio"]
    families = (ROOT / "docs/server.md").read_text().splitlines()
    [rejected] = [line for line in families if "`weir_requests_rejected_total`" in line]
    assert "queue_full" in rejected


def test_the_recipes_scale_the_deployment_and_keep_one_owner() -> None:
    kinds = {block["kind"]: block for block in blocks() if "kind" in block}
    assert kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["kind"] == "Deployment"
    assert "kind" not in kinds["ScaledObject"]["spec"]["scaleTargetRef"], "KEDA's default is a Deployment"

"""Pod templates as they were: what changes one restarts every pod that an operator of an earlier version made.

`python tests/unit/test_pod_templates.py` writes the goldens anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from weir_operator.plan.pin import Pinned
from weir_operator.plan.plan import parse
from weir_operator.plan.pods import pod_template

GOLDENS = Path(__file__).parents[1] / "goldens/pod-templates"
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"model": {"source": "file:///models/m.gguf"}},
    "downloaded": {"model": {
        "source": "hf://acme/tiny@main", "endpoint": "https://hub.example", "secretRef": {"name": "hub"},
        "cache": {"size": "20Gi"},
    }},
    "claim": {"model": {"source": "pvc://weights/llama/7b"}},
    "image": {"model": {"source": "oci://registry/tiny:1#m.gguf"}},
    "sidecar": {
        "model": {"source": "s3://bucket/m.gguf"}, "sidecar": True,
        "template": {"spec": {"containers": [{"name": "app", "image": "app:1"}]}},
    },
    "everything": {
        "model": {
            "source": "https://host/m.gguf", "servedName": "acme/tiny", "maxModelLen": 2048, "quantization": "int8",
            "dtype": "float32", "sha256": "0a" * 32, "cache": {"claimName": "models"},
        },
        "engine": {
            "limits": {"maxBatchSize": 8, "kvCache": "1Gi", "batchTokens": 512}, "threads": 2, "prefillChunkTokens": 128,
            "prefillGrantInterval": 4, "scheduler": "prefill_first", "preemption": "longest-first",
            "pressurePolicy": "least_progress", "offload": "512Mi", "prefixCaching": False, "extraArgs": ["--page-size=32"],
        },
        "drain": {"timeout": "20m"}, "rollout": {"progressDeadline": "1h"},
        "auth": {"secretRef": {"name": "clients"}, "key": "keys.txt"},
        "image": "registry/own:1", "imagePullPolicy": "Always",
        "template": {
            "metadata": {"annotations": {"team": "a"}},
            "spec": {
                "containers": [{"name": "server", "resources": {"limits": {"memory": "2Gi"}}}], "nodeSelector": {"a": "b"},
            },
        },
    },
}


def rendered(name: str) -> str:
    """With the image alone, as if pinned by an operator that knew no other field."""
    resource = parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "team-a", "uid": "u-1"}, "spec": SPECS[name],
    })
    template = json.dumps(pod_template(resource, Pinned("registry/weir-server:1")))  # so that nothing in it is held in common
    return yaml.safe_dump(json.loads(template), sort_keys=True, width=120)


@pytest.mark.parametrize("name", SPECS)
def test_no_template_changes_but_by_a_field_that_is_pinned(name: str) -> None:
    assert rendered(name) == (GOLDENS / f"{name}.yaml").read_text(), (
        f"the pod template of {name!r} changed: the upgrade to this operator would restart every such pod. Make it a field of "
        "plan/pin.py's Pinned whose default is what there was before. Where the restart is meant, say so in the changelog and "
        f"run python {Path(__file__).relative_to(Path(__file__).parents[2])}"
    )


def test_every_golden_is_held_against_something() -> None:
    assert {file.stem for file in GOLDENS.iterdir()} == set(SPECS)


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for spec in SPECS:
        (GOLDENS / f"{spec}.yaml").write_text(rendered(spec))

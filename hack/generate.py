"""Everything that is made from something else: `make generate`, or `python hack/generate.py [--helm HELM]`.

| made | from |
|---|---|
| crds/, charts/weir/templates/crd.yaml, docs/api.md, docs/conditions.md | operator/weir_operator/api |
| docs/operator-metrics.md | operator/weir_operator/io/metrics.py |
| docs/server.md | server/weir_server: commands, routes, metrics |
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "server")]  # of this checkout, whatever is installed

from weir_operator.api import crd  # noqa: E402
from weir_operator.io import metrics  # noqa: E402
from weir_server.cli import reference  # noqa: E402


def generated() -> dict[Path, str]:
    """Path below the repository → content, of all that needs no other program."""
    return {**crd.rendered(), Path("docs/operator-metrics.md"): metrics.reference(), reference.PATH: reference.page()}


def main() -> None:
    for path, text in generated().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())

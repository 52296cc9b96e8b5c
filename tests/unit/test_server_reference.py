"""docs/server.md is what the server is: its commands and flags, its routes, every family of a scrape."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from weir_server.cli import reference
from weir_server.cli.serve import announce

ROOT = Path(__file__).parents[2]
TABLE = """--host --port --control-port --control-host --control-token-file --api-key --api-key-file --served-model-name
--ctx-size --dtype --quantize --parallel --n-parallel --max-batch-size --max-queue-depth --scheduler --max-batch-tokens
--max-requests-per-batch --prefill-chunk-size -b --batch-size --prefill-grant-interval --max-batch-prefill
--max-batch-prefill-tokens
--kv-cache-budget --kv-cache-budget-min --boot-file --kv-admission-watermark --safety-margin --page-size --num-blocks
--max-memory-percent --no-prompt-cache --allow-block-sharing --enable-preemption --preemption-policy --cpu-offload-space
--no-batch --pressure-policy --decode-storage-backend --deterministic --no-metrics --drain-timeout --slo-ttft --slo-tpot"""


def test_the_page_is_generated_from_what_is_there():
    assert (ROOT / reference.PATH).read_text(encoding="utf-8") == reference.page(), "run `make generate`"


@pytest.mark.parametrize("path", [
    "native batched forward", "per-row fallback (aggregate decode throughput will not scale with --parallel)",
])  # fmt: skip
def test_a_start_says_how_rows_decode_together_under_the_served_id(path: str, capsys: pytest.CaptureFixture[str]):
    service = reference._silent_service()
    service.ready = msgspec.structs.replace(service.ready, model={"family": "stub", "decode_path": path})
    announce(service)
    assert f"\nModel MODEL decode path: {path}\n" in capsys.readouterr().out


def test_every_flag_of_the_design_is_there_and_every_row_says_something():
    page = reference.page()
    assert [flag for flag in TABLE.split() if f"`{flag}`" not in page] == []
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 150 and [row for row in rows if row.rstrip("| ").endswith("`")] == []

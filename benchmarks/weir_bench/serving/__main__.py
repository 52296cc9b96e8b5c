"""The command line of weir_bench.serving; see the package for what its figures mean."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from weir_bench import results, tables
from weir_bench.servers import ServerError
from weir_bench.serving import __doc__ as doc
from weir_bench.serving import footprint, latency, peers, replay, side_by_side, start
from weir_bench.serving.run import FULL, SHORT, Run
from weir_operator.simulate.traces import TraceError
from weir_server.model.files import ModelError, resolve

Table = Callable[[Run], Awaitable[Path | None]]
SHORT_TABLES: dict[str, Table] = {
    "float32": side_by_side.float32, "int8": side_by_side.int8, "waves": latency.waves, "poisson": latency.poisson,
    "start": start.start,
}  # fmt: skip
TABLES: dict[str, Table] = {**SHORT_TABLES, "peers": side_by_side.peers, "footprint": footprint.footprint,
                            "replay": replay.replay}


def arguments() -> argparse.ArgumentParser:
    parser = results.arguments("serving", doc or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "tables:\n" + "\n".join(f"  {n:8} {(t.__doc__ or '').strip()}" for n, t in TABLES.items())
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"default: {', '.join(SHORT_TABLES)}; with --full all")
    parser.add_argument("--full", action="store_true", help="more rounds, more contenders (an hour)")
    parser.add_argument("--rounds", type=int, help="another number of rounds")
    parser.add_argument("--add", action="store_true", help="add rounds to raw data of the same code instead of replacing it")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server and llama-quantize (default: PATH)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="with recorded traces, for the table replay")
    return parser


async def measure(args: argparse.Namespace) -> None:
    """All tables that were asked for. Raises ServerError, ModelError, TraceError, OSError."""
    form = FULL if args.full else SHORT
    if args.rounds:
        form = type(form)(**{**{f: getattr(form, f) for f in form.__slots__}, "rounds": args.rounds})
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        setting = peers.Setting(
            args.model, resolve(args.model), Path(folder), psutil.cpu_count() or 1, peers.find_llama(args.llama)
        )
        run = Run(setting, form, args.output, args.traces, args.add)
        for name in args.tables or (TABLES if args.full else SHORT_TABLES):
            began = time.monotonic()
            run.begin()
            print(f"--- {name}: {(TABLES[name].__doc__ or '').strip()}", flush=True)
            path = await TABLES[name](run)
            print(f"{path or 'nothing to measure'} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table is called {sorted(unknown)[0]}")
    try:
        asyncio.run(measure(args))
    except KeyboardInterrupt:
        print("interrupted; all servers are ended", file=sys.stderr)
        return 130
    except (ServerError, ModelError, TraceError, OSError) as e:
        print(f"benchmark: {e}", file=sys.stderr)
        return 1
    if args.output.resolve() == results.FOLDER:  # the pages show what is kept here
        tables.generate(args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

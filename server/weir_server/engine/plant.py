"""The server's measurement of itself at boot: step = a + b·rows + c·context + p·prefill tokens, in about half a second.

Four kinds of step are timed, interleaved so that a disturbance hits all of them alike, and their medians solved for the
four coefficients. Rows share the blocks of their context, and one ring where there are sliding layers: the time of a step does
not depend on the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from weir_server.contract import Plant
from weir_server.exec.interface import RowWork, Runner
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.kv.shape import Shape
from weir_server.link.messages import Sampling

SECONDS = 0.5
"""After which no further step begins, once there is one of each kind: part of the time to a pod's first token."""
SHORT, LONG = 16, 512
ROWS = 8
CHUNK = 64
"""Most prompt tokens of a step: from here on, a step's time is proportional to them."""
REPEATS = 7
_SAMPLING = Sampling(max_tokens=1 << 20, temperature=0.0)


def measure(
    runner: Runner, *, usable: int, context: int, max_rows: int, prefill_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Plant, dict[str, float]]:
    """The plant, and the medians that it comes from by name, in seconds. Writes `usable` chunks of an idle runner's pool."""
    shape = Shape.of(runner.geometry, runner.window, prefill_tokens)
    size, full, per_ring = shape.block_tokens, shape.full_per_chunk, shape.ring_per_chunk
    rings = range(RESERVED_CHUNKS * per_ring, (RESERVED_CHUNKS + usable - min(1, full)) * per_ring)
    ring = list(rings[: shape.need(0, context).ring])
    taken = RESERVED_CHUNKS + (-(-len(ring) // per_ring) if ring else 0)
    blocks = range(taken * full, (RESERVED_CHUNKS + usable) * full)
    most = len(blocks) if full else (ROWS + 1) * shape.blocks(context)
    rows = max(2, min(ROWS, max_rows, most // 2)) if runner.supports_batching and min(max_rows, most // 2) > 1 else 1
    room = (most - rows) * size  # tokens of the shared context: each row writes a block of its own behind it
    short, long = min(SHORT, room, context - 1), min(LONG, room, context - 1)
    chunk = max(1, min(prefill_tokens, CHUNK, room, context - 1))

    def decode(n: int, held: int) -> list[RowWork]:
        start = held // size * size
        shared = blocks[: start // size]
        return [_row([1], start, [*shared, blocks[-1 - i]] if full else [], ring, i) for i in range(n)]

    kinds = {
        "1 row": decode(1, short),
        f"{rows} rows": decode(rows, short),
        f"{rows} rows at {long} tokens": decode(rows, long),
        f"prefill chunk of {chunk}": [_row([1] * chunk, 0, blocks[: shape.blocks(chunk)], ring, 0)],
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    end = clock() + SECONDS
    for repeat in range(REPEATS + 1):
        for name, work in kinds.items():
            if clock() > end and times[name]:
                break
            start = clock()
            runner.execute(work)
            if repeat or clock() > end:  # the first of each kind warms up
                times[name].append(clock() - start)
    runner.release_chunks(sorted({b // full for work in kinds.values() for row in work for b in row.blocks}))
    runner.release_chunks(sorted({b // per_ring for b in ring}))
    steps = {name: median(values) for name, values in times.items()}
    one, many, far, prompt = steps.values()
    return solve(one, many, far, prompt, rows, _held(short, size), _held(long, size), chunk, prefill_tokens), steps


def solve(
    one: float, many: float, far: float, prompt: float, rows: int, short: int, long: int, chunk: int, prefill_tokens: int
) -> Plant:
    """Coefficients from the four step times, none of them negative: noise goes to the step's fixed part."""
    c = max(0.0, (far - many) / (rows * (long - short))) if long > short else 0.0
    b = max(0.0, (many - one) / (rows - 1) - c * short) if rows > 1 else 0.0
    a = max(0.0, one - b - c * short)
    return Plant(a=a, b=b, c=c, p=max(0.0, (prompt - a) / chunk), prefill_tokens=prefill_tokens)


def _held(tokens: int, size: int) -> int:
    return tokens // size * size + 1


def _row(tokens: list[int], start: int, blocks: Sequence[int], ring: list[int], choice: int) -> RowWork:
    context = [1] * (start + len(tokens))
    return RowWork(tokens, start, list(blocks), True, _SAMPLING, choice, context, prompt_len=len(context), ring=ring)

"""What a server of 8-bit weights takes of memory, after it has served every slot once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from weir_bench.serving import rounds
from weir_bench.serving.peers import HALVED
from weir_bench.serving.record import OUTPUT, PROMPT
from weir_bench.serving.run import Run, named


async def footprint(run: Run) -> Path | None:
    """Memory after all slots were in use, anonymous and with the mapped files, beside llama.cpp's Q8_0."""
    able = run.contenders([*named("weir", "int8"), HALVED, *named("llama.cpp", "int8"), *named("weir", "float32")])
    of: dict[str, dict[str, float]] = {}
    servers = []
    for contender in able:  # in turn: none of them shares the machine's memory with another
        async with rounds.all_up([contender], run.setting) as up:
            [one] = up.values()
            await rounds.load(one, 0, run.setting.slots, run.setting.slots, prompt=PROMPT, output=OUTPUT)
            of[contender.name] = found = held(one.running.process)
            servers.append(one.server)
        run.say(f"{contender.name:24} " + ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in found.items()))
    work: dict[str, Any] = {"prompt": PROMPT, "output": OUTPUT, "slot_tokens": run.setting.slot_tokens}
    return run.write("footprint", of, work, servers)


def held(process: psutil.Process) -> dict[str, float]:
    """Bytes of a process and all below it: anonymous, and proportional (`pss`: pages that they share count once)."""
    anonymous = pss = 0
    for p in [process, *process.children(recursive=True)]:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{p.pid}/smaps_rollup").read_text().splitlines()[1:])
        anonymous += int(lines["Anonymous"].split()[0]) * 1024
        pss += int(lines["Pss"].split()[0]) * 1024
    return {"anonymous": anonymous, "pss": pss}

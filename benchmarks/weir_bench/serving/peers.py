"""Who takes part, in one table: how each is started, what it counts, what its kernels are, and why one cannot run here."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.servers import Running, ServerError, free_port, started, weir
from weir_bench.serving.figures import Shape
from weir_bench.serving.record import Server
from weir_server.cli.flags import NOT_YET

SLOTS, SLOT_TOKENS = 32, 512
"""Requests at a time that every contender is set up for, and the tokens that each of them may have."""
HELP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run was given. `folder`: for the files that it makes; `threads`: of every contender."""

    model: str
    path: Path
    folder: Path
    threads: int
    llama: Path | None = None
    slots: int = SLOTS
    slot_tokens: int = SLOT_TOKENS
    flags: tuple[str, ...] = ()
    """More flags for our server."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the server began: tokens that it generated, and forward passes."""

    tokens: float
    forwards: float


@dataclass(frozen=True, slots=True)
class Contender:
    """`missing`: one sentence where it cannot run here. `isa`: instruction sets of the kernels that it uses, None where it is
    not asked.
    `weight_bytes`, `kv_element`: bytes of a weight, and of a number in its KV cache."""

    name: str
    system: str
    precision: str
    start: Callable[[Setting], AbstractAsyncContextManager[Running]]
    missing: Callable[[Setting], str | None]
    counters: Callable[[Running], Any]
    isa: Callable[[Running], Any]
    version: Callable[[Setting], str]
    weight_bytes: float
    kv_element: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Of each request's body, beside what all are asked."""

    def server(self, running: Running, shape: Shape, isa: list[str], version: str, idle: float) -> Server:
        return Server(
            self.name, self.system, self.precision, [Path(c).name if "/" in c else c for c in running.child.command], version,
            isa, self.weight_bytes * shape.parameters, shape.kv_token_bytes(self.kv_element), idle,
        )  # fmt: skip


def shape_of(path: Path) -> Shape:
    from weir_server.model.loader import read_config, shapes

    c = read_config(path)
    layers = sum(math.prod(shape) for name, shape in shapes(c).items() if name.startswith("layers.") and len(shape) == 2)
    return Shape(layers, c.vocab * c.hidden, c.layers, c.heads * c.head_dim, c.kv_heads * c.head_dim)


def samples(text: str) -> dict[str, float]:
    """Of Prometheus' text format: values by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def counted(tokens: str, forwards: str) -> Callable[[Running], Any]:
    """Counters that /metrics shows under these names. Raises ServerError where one is not there."""

    async def read(running: Running) -> Counters:
        found = samples(await running.text("/metrics"))
        if missing := [name for name in (tokens, forwards) if name not in found]:
            raise ServerError(f"its /metrics shows no {missing[0]}, so nobody can say whether it batches")
        return Counters(found[tokens], found[forwards])

    return read


# ---------------------------------------------------------------- ours


def _weir(precision: str, kv: str = "fp32") -> Contender:
    flags = (f"--kv-cache-dtype={kv}", *(() if precision == "float32" else (f"--quantize={precision}",)))

    def start(s: Setting) -> AbstractAsyncContextManager[Running]:
        return weir(
            f"--parallel={s.slots}", f"--max-requests-per-batch={s.slots}", f"--ctx-size={s.slots * s.slot_tokens}",
            f"--max-queue-depth={4 * s.slots}", "--no-prompt-cache", f"--threads={s.threads}", *flags, *s.flags, model=s.model,
        )  # fmt: skip

    async def isa(running: Running) -> list[str]:
        return [(await running.get("/control/state", control=True))["model"]["linear"].lower()]

    def missing(_: Setting) -> str | None:
        quantizes = "--quantize" not in NOT_YET
        return None if precision == "float32" or quantizes else f"this weir-server has no --quantize={precision}"

    return Contender(
        f"weir {precision}" + ("" if kv == "fp32" else f", KV {kv.upper()}"), "weir", precision, start, missing,
        counted("weir_generation_tokens_total", "weir_engine_steps_total"), isa, lambda _: results.version("weir") or "",
        WEIGHT_BYTES[precision], 4 if kv == "fp32" else 2,
    )  # fmt: skip


WEIGHT_BYTES = {"float32": 4.0, "int8": 1.125, "F32": 4.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}
"""Bytes of a weight: 8 bits with a float32 scale for each 32 are 1.125; Q8_0 and Q4_0 have a scale of two bytes instead."""


# ---------------------------------------------------------------- llama.cpp


def _llama(kind: str, precision: str, kv: str) -> Contender:
    """llama-server on `kind` of weights, made from the same file by llama-quantize; `kv`: of the cache, f16 as it comes.
    -lv 4: its log names its kernels, and gains some lines a request."""

    @asynccontextmanager
    async def start(s: Setting) -> AsyncIterator[Running]:
        assert s.llama is not None
        model, port = quantized(s.llama, s.path, kind, s.folder), free_port()
        async with started(
            ["env", f"LD_LIBRARY_PATH={s.llama}", s.llama / "llama-server", "-m", model, "--host", "127.0.0.1",
             "--port", str(port), "-np", str(s.slots), "-c", str(s.slots * s.slot_tokens), "-t", str(s.threads),
             "-tb", str(s.threads), "-b", "2048", "-ub", "512", "-ctk", kv, "-ctv", kv, "--cont-batching", "--no-webui",
             "--metrics", "--cache-ram", "0", "-lv", "4"], port, "/health",
        ) as running:  # fmt: skip
            yield running

    async def isa(running: Running) -> list[str]:
        return llama_isa(running.log())

    def missing(s: Setting) -> str | None:
        return None if s.llama else "no folder of llama.cpp is given (--llama FOLDER, or llama-server on PATH)"

    return Contender(
        f"llama.cpp {kind}, KV {kv.upper()}", "llama.cpp", precision, start, missing,
        counted("llamacpp:tokens_predicted_total", "llamacpp:n_decode_total"), isa, _llama_version,
        WEIGHT_BYTES[kind], 4 if kv == "f32" else 2, {"cache_prompt": False},
    )  # fmt: skip


def quantized(llama: Path, source: Path, kind: str, folder: Path) -> Path:
    """`source` with all its weights as `kind`; made once a run. Raises ServerError with llama-quantize's last line."""
    target = folder / f"{kind}.gguf"
    if not target.exists():
        done = subprocess.run(
            [llama / "llama-quantize", "--allow-requantize", source, target, kind], capture_output=True, text=True,
            env={"LD_LIBRARY_PATH": str(llama)}, timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise ServerError(f"llama-quantize: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    return target


def llama_isa(log: str) -> list[str]:
    """The instruction sets that its system_info line says its kernels use, under the names of /proc/cpuinfo."""
    line = next((line for line in log.splitlines() if "system_info" in line), "")
    names = {"AVX2": "avx2", "FMA": "fma", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
             "AMX_INT8": "amx_tile", "NEON": "asimd"}
    return [name for said, name in names.items() if re.search(rf"\b{said} = 1\b", line)]


def _llama_version(s: Setting) -> str:
    assert s.llama is not None
    said = subprocess.run([s.llama / "llama-server", "--version"], capture_output=True, text=True, timeout=HELP_SECONDS,
                          env={"LD_LIBRARY_PATH": str(s.llama)})  # fmt: skip
    return next((line for line in (said.stderr + said.stdout).splitlines() if "version" in line), "unknown")


def find_llama(given: Path | None) -> Path | None:
    """The folder of llama-server: as given, or where PATH has it."""
    if given is None:
        found = shutil.which("llama-server")
        return Path(found).resolve().parent if found else None
    if not (given / "llama-server").exists():
        raise ServerError(f"{given} holds no llama-server")
    return given.resolve()


def refuse_other_kernels(name: str, isa: list[str], machine: list[str]) -> None:
    """Raises ServerError where the processor has wide vectors and the rival's kernels do not use them."""
    said = " ".join(isa).replace("avx-512", "avx512f")
    for wide in ("avx512f", "avx2"):
        if wide in machine:
            if wide not in said:
                raise ServerError(f"{name} runs without {wide}, which this processor has: a comparison would say nothing")
            return


# ---------------------------------------------------------------- other rivals, behind an HTTP adapter of ours


def _adapted(system: str, module: str, precision: str, weight_bytes: float, kv_element: int) -> Contender:
    @asynccontextmanager
    async def start(s: Setting) -> AsyncIterator[Running]:
        port = free_port()
        command = [sys.executable, "-m", "weir_bench.serving.adapters", system, str(s.path), f"--port={port}",
                   f"--threads={s.threads}", f"--slots={s.slots}", f"--slot-tokens={s.slot_tokens}"]  # fmt: skip
        async with started(command, port, "/health") as running:
            yield running

    async def isa(_: Running) -> None:
        return None

    def missing(s: Setting) -> str | None:
        return None if importlib.util.find_spec(module) else f"{system} is not installed"

    return Contender(
        f"{system} {precision}", system, precision, start, missing, counted("adapter_tokens_total", "adapter_forwards_total"),
        isa, lambda _: results.version(system) or "", weight_bytes, kv_element,
    )  # fmt: skip


# ---------------------------------------------------------------- the table

HALVED = _weir("int8", "bf16")
"""With a KV cache as wide as llama.cpp's is as it comes."""
CONTENDERS = (
    _weir("float32"),
    _llama("F32", "float32", "f16"),
    _llama("F32", "float32", "f32"),
    _weir("int8"),
    _llama("Q8_0", "int8", "f16"),
    _llama("Q8_0", "int8", "f32"),
    _llama("Q4_0", "int4", "f16"),
    _adapted("transformers", "transformers", "float32", 4.0, 4),
    _adapted("openvino-genai", "openvino_genai", "as the file", 20 / 32, 2),
)

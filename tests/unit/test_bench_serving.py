"""The harness of every claim about speed: its arithmetic, its order, whom it refuses, what it writes, that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from weir_bench import results, roofs, tables
from weir_bench.roofs import Roofs
from weir_bench.servers import ServerError, free_port, started
from weir_bench.serving import __main__ as command_line
from weir_bench.serving import figures, latency, peers, report, rounds, side_by_side
from weir_bench.serving import run as run_module
from weir_bench.serving import start as start_module
from weir_bench.serving.__main__ import TABLES
from weir_bench.serving.figures import Shape, claims, decode_shares, pairs, prefill_share, turns
from weir_bench.serving.peers import Contender, Setting, counted, llama_isa, refuse_other_kernels, samples
from weir_bench.serving.record import Cell, Document, Server
from weir_bench.serving.replay import LOADS
from weir_bench.serving.run import Form, Run
from weir_server.model.files import resolve

RIVAL = Path(__file__).with_name("rival.py")


# ---------------------------------------------------------------- arithmetic


def cell(server="weir", round=0, clients=8, tps=100.0, itl=0.05, ttft=1.0, output=64, rows=7.5, **more):
    times = 2.0, tps, ttft, ttft, itl, itl, itl
    return Cell(server, round, clients, clients, 128, output, *times, rows, 1.0, 0.0, 0.0, 2.0, **more)


def server(name="weir", system="weir", precision="float32", weights=400.0, kv=1.0):
    return Server(name, system, precision, [], "1", ["avx2"], weights, kv)


def test_servers_take_turns_within_each_load():
    assert list(turns(2, (1, 8), ("A", "B"))) == [
        (0, 1, "A"), (0, 1, "B"), (0, 8, "A"), (0, 8, "B"), (1, 1, "A"), (1, 1, "B"), (1, 8, "A"), (1, 8, "B"),
    ]  # fmt: skip


def test_ratios_are_taken_pair_by_pair_and_say_how_often_ours_is_as_fast():
    assert pairs({0: 10.0, 1: 30.0, 2: 5.0}, {0: 5.0, 1: 10.0}, less=False) == [2.0, 3.0]
    assert pairs({0: 2.0}, {0: 1.0}, less=True) == [0.5]
    assert pairs({0: 2.0}, {1: 1.0}, less=True) == []


def test_a_claim_is_against_the_form_of_a_rival_that_is_fastest_in_that_figure():
    servers = [server(), server("L f16", "llama.cpp"), server("L f32", "llama.cpp"), server("other", "llama.cpp", "int8")]
    cells = [
        *(cell("weir", n, tps=tps) for n, tps in enumerate((100, 120, 90))),
        *(cell("L f16", n, tps=50, itl=0.04) for n in range(3)),
        *(cell("L f32", n, tps=60, itl=0.10) for n in range(3)),
        *(cell("other", n, tps=900) for n in range(3)),
    ]
    made = {c.figure: c for c in claims(cells, servers, (1, 8), 64)}
    assert {c.clients for c in made.values()} == {8}, "no claim where nothing was measured"
    tokens = made["tokens_per_second"]
    assert (tokens.rival, tokens.ratio.median, tokens.ratio.n) == ("L f32", pytest.approx(100 / 60), 3)
    assert (tokens.ratio.least, tokens.ratio.most) == (1.5, 2.0)
    assert made["itl_p50"].rival == "L f16" and made["itl_p50"].ratio.median == pytest.approx(0.8)


def test_medians_have_their_spread_and_only_whole_cells_count():
    assert figures.of([3.0, 1.0, 2.0]) == figures.Spread(2.0, 1.0, 3.0, 3)
    assert figures.series([cell(itl=None)], "weir", 8, "itl_p50", 64) == {}
    assert figures.median_cell([cell(itl=i) for i in (3, 1, 2)], "weir", 8, 64, "itl_p50").itl_p50 == 2
    assert figures.median_cell([], "weir", 8, 64, "itl_p50") is None


SHAPE = Shape(layers_parameters=80, head_parameters=20, layers=2, heads_width=3, kv_width=1)


def test_shares_of_roofs_worked_by_hand():
    """8 rows of 128 + 64 ÷ 2 = 160 tokens, a step of 0.05 s: 400 + 8 · 160 bytes; 8 · (2 · 100 + 4 · 2 · 3 · 160)."""
    read, fma = decode_shares(cell(read_roof=67200.0, fma_roof=1e6), server(), SHAPE)
    assert (read.roof, read.share) == ("read", pytest.approx((400 + 8 * 160) / 0.05 / 67200))
    assert read.share == pytest.approx(0.5)
    flops = 8 * (200 + 3840)
    assert (fma.roof, fma.share, fma.intensity) == ("fma", pytest.approx(flops / 0.05 / 1e6), pytest.approx(flops / 1680))
    assert SHAPE.kv_token_bytes(4) == 16.0
    assert SHAPE.prefill_flops(3) == 3 * 160 + 24 * (1 + 2 + 3) + 40, "each token sees itself and those before"
    prefill = prefill_share(cell(output=1), server(), SHAPE, Roofs(2, 1.0, 1.0, gemm=1e6))
    assert prefill.share == pytest.approx(8 * SHAPE.prefill_flops(128) / 2.0 / 1e6)
    assert prefill_share(cell(output=1), server(), SHAPE, Roofs(2, 1.0, 1.0)) is None, "an unknown roof is no roof"
    assert decode_shares(cell(itl=None, read_roof=1.0, fma_roof=1.0), server(), SHAPE) == []
    assert decode_shares(cell(), server(), SHAPE) == [], "nor is one that was not measured"
    mixed = cell(rows=4.0, read_roof=1.0, fma_roof=1e6)
    assert decode_shares(mixed, server(), SHAPE) == [], "half of what these steps do is prefill"
    [whole] = figures.whole_share(mixed, server(), SHAPE)
    assert whole.share == pytest.approx(8 * (SHAPE.prefill_flops(128) + 64 * (200 + 3840)) / 2.0 / 1e6)
    assert figures.whole_share(cell(), server(), SHAPE) == []


def test_a_share_is_of_the_roof_beside_it_and_the_median_counts():
    """The machine gave twice as much in the second round, and the server took twice as much of it."""
    kind = [cell(itl=0.05, read_roof=67200.0), cell(itl=0.025, read_roof=134400.0), cell(read_roof=1e9)]
    assert [s.share for s in figures.median_shares(kind, server(), SHAPE)] == [pytest.approx(0.5)]


def test_the_shape_of_smollm2_is_what_its_weights_weigh():
    shape = peers.shape_of(resolve(results.MODEL))
    assert 4 * shape.parameters == pytest.approx(538_060_032, rel=0.001)  # norms are not products
    assert shape.kv_token_bytes(4) == 30 * 2 * 3 * 64 * 4


def test_the_best_of_several_roofs_counts_and_registers_have_widths():
    assert roofs.best([Roofs(2, 1.0, 9.0), Roofs(2, 3.0, 4.0)], gemm=5.0) == Roofs(2, 3.0, 9.0, 5.0)
    assert [roofs.vector_bytes(isa) for isa in (["avx2"], ["avx2", "avx512f"], ["asimd"])] == [32, 64, 16]


def test_roofs_of_this_machine_are_measured_by_the_program(tmp_path):
    program = roofs.build(tmp_path)
    if program is None:
        pytest.skip("no C compiler")
    measured = roofs.measure(program, 0.05)
    assert measured.threads >= 1 and 1e8 < measured.read < 1e13 and 1e8 < measured.fma < 1e14


# ---------------------------------------------------------------- whom to believe


def test_counters_are_read_from_prometheus_text_summed_over_labels():
    text = '# HELP a x\n# TYPE a counter\na{b="1 2"} 3\na{b="2"} 4.5\nllamacpp:n 2e3\n'
    assert samples(text) == {"a": 7.5, "llamacpp:n": 2000.0}


LOG = "I system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 0 | REPACK = 1 |"


def test_a_rival_without_the_kernels_of_this_processor_is_no_rival():
    assert llama_isa(LOG) == ["avx2", "fma"] and llama_isa("nothing") == []
    refuse_other_kernels("x", llama_isa(LOG), ["avx2", "fma"])
    refuse_other_kernels("weir", ["own float32 on avx-512, independent of the row count"], ["avx2", "avx512f"])
    refuse_other_kernels("x", [], ["asimd"])
    for isa, machine in ((["avx2", "fma"], ["avx2", "avx512f"]), (["torch's"], ["avx2"]), ([], ["avx2"])):
        with pytest.raises(ServerError, match=r"without avx\w+, which this processor has"):
            refuse_other_kernels("x", isa, machine)


def contender(tmp_path, name, mode="batching", system="rival", precision="float32", missing=None):
    @asynccontextmanager
    async def start(_):
        port = free_port()
        async with started([sys.executable, RIVAL, str(port), mode, str(tmp_path)], port, "/health") as running:
            yield running

    async def isa(_):
        return list(results.machine()["isa"])

    return Contender(name, system, precision, start, lambda _: missing, counted("rival_tokens", "rival_passes"), isa,
                     lambda _: "0", 4.0, 4)  # fmt: skip


def setting(tmp_path):
    return Setting(results.MODEL, resolve(results.MODEL), tmp_path, threads=1, slots=4)


async def run_load(tmp_path, mode, clients=4):
    async with rounds.all_up([contender(tmp_path, "R", mode)], setting(tmp_path)) as up:
        return await rounds.load(up["R"], 0, clients, clients, prompt=4, output=16)


async def test_a_server_that_batches_is_measured(tmp_path):
    found = await run_load(tmp_path, "batching")
    assert found.forward_rows == pytest.approx(4, rel=0.4) and found.requests == 4 and found.events == pytest.approx(1)
    assert 0 < found.itl_p50 <= found.itl_p95 and found.tokens_per_second > 0


async def test_a_server_that_does_not_batch_is_refused(tmp_path):
    with pytest.raises(rounds.NotBatchingError, match=r"R does not batch: 1\.00 tokens"):
        await run_load(tmp_path, "serial")


@pytest.mark.parametrize(("mode", "says"), [
    ("silent", "R: its /metrics shows no rival_tokens"),
    ("mortal", r"R died \(status 3; out of memory, or so\)"),
    ("short", "R serves badly: 4 of 4 requests failed, the first with: 4 of 8 tokens"),
    ("stillborn", "R: python.* does not serve: the port is taken, say"),
])
async def test_a_rival_that_dies_or_tells_nothing_is_one_sentence(tmp_path, mode, says):
    with pytest.raises(ServerError, match=says) as error:
        await run_load(tmp_path, mode)
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)


@pytest.mark.parametrize(("clients", "rows", "held"), [
    (1, 0.3, True), (2, 1.2, False), (2, 1.3, True), (8, 1.5, False), (8, 1.7, True), (32, 6.3, False), (32, 6.5, True),
])
def test_what_counts_as_batching(clients, rows, held):
    if held:
        rounds.must_batch("x", clients, rows)
    else:
        with pytest.raises(rounds.NotBatchingError):
            rounds.must_batch("x", clients, rows)


# ---------------------------------------------------------------- a whole table


async def test_a_table_is_written_in_its_shape_and_said_on_both_pages(tmp_path):
    said = []
    run = Run(setting(tmp_path), Form("trial", 2, {1: 2, 4: 1}, 1, 1.0), tmp_path / "out", say=said.append)
    absent = Contender("gone", "rival", "float32", None, lambda _: "it is not installed", None, None, None, 4.0, 4)
    ours, rival = contender(tmp_path, "weir float32", "quick", "weir"), contender(tmp_path, "R, KV F16", "quick")
    path = await side_by_side.measure(run, "float32", [ours, rival, absent])
    doc = msgspec.json.decode(path.read_bytes(), type=Document)
    assert doc.form == "trial" and doc.benchmark == "serving-float32" and doc.skipped == ["gone: it is not installed"]
    assert [(c.round, c.clients, c.server[0]) for c in doc.cells] == [
        (r, n, s) for r in range(2) for n in (1, 4, side_by_side.PREFILL.clients) for s in ("w", "R")
    ]
    assert {"cpu", "isa", "versions", "cores"} <= doc.machine.keys() and doc.date
    assert {(c.figure, c.clients) for c in doc.claims} == {(f, n) for f in figures.FASTER_IS_LESS for n in (1, 4)}
    assert all(c.ratio.n == 2 for c in doc.claims)
    if doc.roofs:
        assert len(doc.roofs_measured) == len(doc.cells) + 1 and doc.roofs.read == max(m.read for m in doc.roofs_measured)
        assert all(c.read_roof <= doc.roofs.read and c.fma_roof <= doc.roofs.fma for c in doc.cells)
        assert {s.roof for s in doc.shares} == {"read", "fma", "gemm"}
    assert path.with_suffix(".png").stat().st_size > 10_000
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in (docs / "benchmarks.md", tmp_path / "README.md"):
        page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.generate(tmp_path / "out", tmp_path)
    section, readme = (docs / "benchmarks.md").read_text(), (tmp_path / "README.md").read_text()
    ratio = next(c for c in doc.claims if (c.figure, c.clients) == ("tokens_per_second", 4)).ratio
    assert report.ranged(ratio, 1, 2) in section and "Skipped: gone: it is not installed." in section
    assert "| float32 | 4 |" in readme and f"{ratio.median:.2f} ×" in readme
    for page in (section, readme):
        assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page


async def test_rounds_are_added_to_those_of_the_same_code_alone(tmp_path):
    run = Run(setting(tmp_path), Form("trial", 1, {4: 1}, 1, 1.0), tmp_path / "out", add=True, say=lambda _: None)
    ours = [contender(tmp_path, "weir float32", "quick", "weir")]
    for rounds_then in (1, 2):
        path = await side_by_side.measure(run, "float32", ours)
        doc = msgspec.json.decode(path.read_bytes(), type=Document)
        assert [c.round for c in doc.cells if c.output > 1] == list(range(rounds_then))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(doc, machine={**doc.machine, "commit": "another"})))
    with pytest.raises(ServerError, match="can't be added to: its commit is another"):
        await side_by_side.measure(run, "float32", ours)


def test_a_page_without_marks_is_refused_and_raw_data_of_another_shape_is_said(tmp_path):
    with pytest.raises(ValueError, match="a page needs"):
        tables.between("nothing here", "x")
    results.write("serving-float32", {"figures": {}}, tmp_path)
    assert "older form" in tables.render(tmp_path)


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i // 10:02}.{i % 10}000000,{100 + i},{4 + i % 5}\n" for i in range(200)
)
FORM = Form("full", 1, {1: 1, 4: 1}, waves=1, seconds=1.0)


@pytest.mark.parametrize("name", list(TABLES))
async def test_every_table_runs_is_written_and_is_said(tmp_path, monkeypatch, name):
    ours = [contender(tmp_path, f"weir {p}", "quick", "weir", p) for p in ("float32", "int8")]
    rivals = [contender(tmp_path, f"{s} {p}", "quick", s, p) for s, p in (("llama.cpp", "float32"), ("llama.cpp", "int8"))]
    monkeypatch.setattr(run_module, "CONTENDERS", (*ours, *rivals, contender(tmp_path, "T", "quick", "transformers")))
    for file in ("azure_2023_conv.csv", "azure_2023_code.csv"):
        (tmp_path / file).write_text(TRACE)
    monkeypatch.setattr(latency, "SIZES", ("adaptive", "64"))
    monkeypatch.setattr(latency, "SATURATING", 8)
    monkeypatch.setattr(start_module, "STARTS", 1)
    monkeypatch.setattr(roofs, "gemm_peak", lambda: 1e11)  # seconds of torch; the test of a whole table has the real one
    run = Run(setting(tmp_path), FORM, tmp_path / "out", traces=tmp_path, say=lambda _: None)
    path = await TABLES[name](run)
    doc = msgspec.json.decode(path.read_bytes(), type=Document)
    assert path.name == f"serving-{name}.json" and doc.figures and doc.servers and not doc.skipped
    section = tables.render(tmp_path / "out")
    assert f"### serving-{name}" in section and "older form" not in section and "| --- |" in section
    match name:
        case "waves":
            cells = doc.work["cells"]
            assert [(c["round"], c["clients"]) for c in cells] == [(0, 8), (0, 8), (0, 32), (0, 32)]
            assert all(c["asked"] > 0 and c["ratio"] >= 0 and c["itl_p95"] >= c["itl_p50"] for c in cells)
        case "poisson":
            assert list(doc.figures) == ["adaptive", "64"] and path.with_suffix(".png").exists()
        case "replay":
            cells = doc.figures["cells"]
            assert {(c["trace"], c["load"]) for c in cells} == {(t, n) for t in ("conversation", "code") for n in LOADS}
            assert all(0 <= c["goodput"] <= 1 and not c["refused"] and not c["broken"] for c in cells)
        case "start":
            assert all(f["first_token"]["median"] >= f["ready"]["median"] > 0 for f in doc.figures.values())


async def test_a_table_without_ours_or_without_its_data_is_not_written(tmp_path, monkeypatch):
    missing = contender(tmp_path, "weir int8", "quick", "weir", "int8", missing="this weir-server has no --quantize=int8")
    monkeypatch.setattr(run_module, "CONTENDERS", (missing, contender(tmp_path, "R", "quick", "llama.cpp", "int8")))
    said = []
    run = Run(setting(tmp_path), FORM, tmp_path / "out", say=said.append)
    assert await side_by_side.int8(run) is None and await TABLES["replay"](run) is None
    assert said == [
        "skipped weir int8: this weir-server has no --quantize=int8",
        "skipped replay: no folder of traces is given (--traces FOLDER)",
    ]  # fmt: skip
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.pid"))


HARNESS = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
import test_bench_serving as t
from weir_bench.serving import __main__ as main, run
folder = Path({folder!r})
run.CONTENDERS = (t.contender(folder, "weir float32", {mode!r}, "weir"), t.contender(folder, "R", "batching", "llama.cpp"))
sys.argv = ["serving", "float32", "-o", str(folder / "out")]
raise SystemExit(main.main())
"""


def harness(tmp_path, mode):
    code = HARNESS.format(paths=[str(RIVAL.parent), *sys.path], folder=str(tmp_path), mode=mode)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_an_interrupt_leaves_no_process(tmp_path):
    """`slow` gives a token a second, so the run is under way for minutes when the signal comes."""
    running = harness(tmp_path, "slow")
    until(lambda: list(tmp_path.glob("*.pid")), "no server was started")
    started_here = [int(p.stem) for p in tmp_path.glob("*.pid")]
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and said.strip() == "interrupted; all servers are ended"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started_here), "a server outlived the run", 10)


def test_the_command_says_in_one_sentence_what_went_wrong(tmp_path):
    running = harness(tmp_path, "stillborn")
    _, said = running.communicate(timeout=120)
    assert running.returncode == 1 and said.startswith("benchmark: weir float32:") and said.count("\n") == 1
    left = [p for p in tmp_path.glob("*.pid") if Path(f"/proc/{p.stem}").exists()]
    assert not left


def test_the_command_names_its_tables(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "weir_bench.serving"]
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 2 and "no table is called nonsense" in done.stderr
    done = subprocess.run([*command, "waves", "--llama", str(tmp_path)], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1 and done.stderr.strip().endswith("holds no llama-server")


def test_the_pages_show_what_is_kept_and_nothing_else(tmp_path, monkeypatch):
    """A trial run into another folder would leave them with its own tables alone."""

    async def nothing(_args):
        pass

    made = []
    monkeypatch.setattr(command_line, "measure", nothing)
    monkeypatch.setattr(command_line.tables, "generate", made.append)
    for where in (["-o", str(tmp_path)], []):
        monkeypatch.setattr(sys, "argv", ["serving", "waves", *where])
        assert command_line.main() == 0
    assert made == [results.FOLDER]

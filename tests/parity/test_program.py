"""Forwards as programs: buffers that do not clash, bits that do not depend on threads, and attention against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_families import make, prompt
from parity_rows import Row, make_runner, step

from weir_server.contract import FULL, SLIDING
from weir_server.exec import cpu, library, program
from weir_server.exec.cpu import CpuBackend
from weir_server.exec.gather import GatherBackend
from weir_server.exec.interface import RowWork
from weir_server.exec.pool import KvPool
from weir_server.exec.program import Call, Program, Tracer, Value
from weir_server.exec.step import UnsupportedError, flatten
from weir_server.link.messages import Sampling
from weir_server.model.config import DecoderConfig, Rope

pytestmark = pytest.mark.torch


# ---------------------------------------------------------------- tracing

@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_value_is_overwritten_while_it_is_wanted(data: Any) -> None:
    """Random lists of operations, run on buffers that remember whose they are."""
    first = Value(0)
    values, calls = [first], []
    for _ in range(data.draw(st.integers(1, 12))):
        one, two = data.draw(st.sampled_from(values)), data.draw(st.sampled_from([None, *values]))
        out = one if data.draw(st.booleans()) and one is not first else Value(data.draw(st.integers(1, 3)))
        calls.append(Call("", (one, two), out, {}))
        values.append(out)
    result = data.draw(st.sampled_from(values[1:]))
    places, widths = program._places(first, result, calls)
    held: dict[int, Value] = {0: first}
    for call in calls:
        for value in call.inputs:
            assert value is None or held[places[value]] is value
        assert widths[places[call.out]] == call.out.width
        held[places[call.out]] = call.out
    assert held[places[result]] is result


def test_buffers_are_shared_and_grow_once(loaded: Any) -> None:
    """A layer's values take turns: layers add no buffers; rows up to a power of two make nothing new."""
    runner = make_runner(loaded, "cpu")
    tracer = Tracer(loaded.config, runner.backend.layers)
    compiled = Program(library.load_library(), tracer, loaded.decoder.hidden, loaded.config.hidden)
    assert len(compiled.widths) <= 10 < len(tracer.calls)
    pointers = list(compiled.pointers)
    compiled._grow(program.LEAST_ROWS)
    assert list(compiled.pointers) == pointers
    compiled._grow(program.LEAST_ROWS + 1)
    assert list(compiled.pointers[1:]) == [b.data_ptr() for b in compiled.buffers]
    assert [b.numel() for b in compiled.buffers] == [2 * program.LEAST_ROWS * w for w in compiled.widths[1:]]


def test_foreign_products_are_refused(loaded: Any) -> None:
    backend = make_runner(loaded, "cpu").backend
    with pytest.raises(UnsupportedError, match="torch's"):
        backend.compile(lambda ops, x: ops.linear(x=x, weight=lambda x: x), 64)


# ---------------------------------------------------------------- threads

@pytest.fixture(scope="module", params=["llama-gqa3", "gemma3"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from weir_server.exec.runner import load
    from weir_server.link.messages import Boot

    path = tmp_path_factory.mktemp("program")
    make(request.param).save_pretrained(path / "model")
    loaded = load(Boot(model=str(path / "model"), threads=2, cache_dir=str(path / "cache")))
    if "own" not in loaded.linear:
        pytest.skip("the C kernels were not built")
    return loaded


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_do_not_change_bits(loaded: Any, threads: None) -> None:
    """One to five of them, more than there are cores, so that barriers are waited at asleep as well."""

    def logits(n: int) -> list[torch.Tensor]:
        torch.set_num_threads(n)
        runner, out = make_runner(loaded, "cpu"), []
        rows = [Row.of(runner, prompt(50 + i, i), i) for i in range(3)]
        for _ in range(8):
            out.append(runner.logits([row.work() for row in rows]))
            step(runner, *((row, None) for row in rows))
        return out

    alone = logits(1)
    assert alone[0].std() > 0.01
    for n in (2, 3, 5):
        assert all(torch.equal(a, b) for a, b in zip(alone, logits(n), strict=True)), n


def test_states_of_rows_that_the_head_does_not_read_are_not_computed(loaded: Any) -> None:
    """Of a piece that does not end a prompt, the last layer gives its keys and values alone: the program is told no rows."""
    runner, seen = make_runner(loaded, "cpu"), []
    hidden = runner._hidden
    runner._hidden = lambda x, step: seen.append(hidden(x, step).shape) or hidden(x, step)
    row = Row.of(runner, prompt(40))
    step(runner, (row, 30))
    step(runner, (row, None))
    assert seen == [(0, loaded.config.hidden), (1, loaded.config.hidden)]


# ---------------------------------------------------------------- attention

def config(heads: int, kv_heads: int, dim: int, window: int | None) -> DecoderConfig:
    kind = FULL if window is None else SLIDING
    return DecoderConfig(
        "llama", hidden=64, heads=heads, kv_heads=kv_heads, head_dim=dim, ffn=96, vocab=512, context=512, rms_eps=1e-5,
        tied=True, layer_types=(kind, kind), window=window, ropes={kind: Rope(10000.0)}, attention_scale=dim**-0.5,
        final_softcap=None,
    )  # fmt: skip


GROUPS = [(4, 4, 16), (2, 1, 64), (9, 3, 64), (6, 1, 32), (8, 1, 128), (14, 2, 256)]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 1, 16, 37])
@pytest.mark.parametrize("page", [16, 32, 80])
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_attention_is_the_oracles(
    shape: tuple[int, int, int], page: int, window: int | None, level: int, dtype: torch.dtype, close: float
) -> None:
    """Rows of all lengths about a page's end beside a prefill, tables at random, blocks shared, other rows' numbers (and what
    is no number) behind the ends, queries and keys so small that products are denormal."""
    c, random = config(*shape, window), torch.Generator().manual_seed(page)
    lengths = [1, 2, page - 1, page, page + 1, 2 * page + 3]
    most = -(-max(lengths) // page) + 1
    pools = [KvPool(c, page, 2 + (len(lengths) + 1) * most, dtype) for _ in range(2)]
    pools[0].flat.copy_(torch.randn(pools[0].flat.shape, generator=random))
    blocks = (torch.randperm((len(lengths) + 1) * most, generator=random) + 2).view(-1, most).tolist()
    works = [_row(b, n - 1, 1) for n, b in zip(lengths, blocks, strict=False)]
    works[-2].blocks[0] = works[-2].ring[0] = works[-1].blocks[0]  # a shared beginning
    works.append(_row(blocks[-1], 0, page + 2))
    kind = next(iter(c.layers_of))
    for b in blocks[-1]:
        pools[0].block(kind, b).fill_(torch.nan)  # left by a row that failed
    pools[1].flat.copy_(pools[0].flat)
    flat = flatten(works, page, c)
    qkv = torch.randn(len(flat.tokens), (c.heads + 2 * c.kv_heads) * c.head_dim, generator=random)
    qkv[1] *= 1e-20
    try:
        loaded = library.load_library()
        if loaded.weir_select(level) != level:
            pytest.skip("this processor does not have that instruction set")
        backends = (at_level(level)(c, pools[0]), GatherBackend(config=c, pool=pools[1]))
        attend = [b.compile(lambda ops, x: ops.attention(layer=1, qkv=x), qkv.shape[1]) for b in backends]
        got, want = (run(qkv.clone(), flat).clone() for run in attend)
    except UnsupportedError as e:
        pytest.skip(str(e))
    finally:
        library.load_library()
    assert torch.isfinite(want).all()
    assert (got - want).abs().max() <= close
    for b in {b for work in works for b in work.blocks}:
        ours, theirs = (pool.block(kind, b).float() for pool in pools)
        assert torch.allclose(ours, theirs, atol=1e-6, rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, equal_nan=True)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [*GROUPS, (10, 10, 16), (15, 5, 64)], ids=str)
def test_heads_read_in_one_go_have_the_bits_that_they_have_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several streams, an odd head left over, more heads than a tile takes at once: the order of every sum stays."""
    c, page = config(*shape, window), 16
    pool = KvPool(c, page, 2 + 5 * 4, dtype)
    pool.flat.copy_(torch.randn(pool.flat.shape, generator=torch.Generator().manual_seed(3)))
    works = [_row(list(range(2 + 4 * i, 6 + 4 * i)), n - 1, 1) for i, n in enumerate((1, 15, 16, 17, 61))]
    flat = flatten(works, page, c)
    qkv = torch.randn(len(works), (c.heads + 2 * c.kv_heads) * c.head_dim)

    def attended(tiles_each: int) -> tuple[int, torch.Tensor]:
        monkeypatch.setattr(cpu, "_TILES_EACH", tiles_each)
        backend = CpuBackend(config=c, pool=pool)
        run = backend.compile(lambda ops, x: ops.attention(layer=0, qkv=x), qkv.shape[1])
        return backend._scratch_for(len(works), 61)[0], run(qkv.clone(), flat).clone()

    (one, alone), (several, together) = attended(1 << 20), attended(1)
    assert (one, several) == (1, min(c.kv_heads, library.load_library().weir_most_heads()))
    assert torch.equal(alone, together)


def at_level(level: int) -> Any:
    """The cpu backend at an instruction set."""

    def build(config: DecoderConfig, pool: KvPool) -> CpuBackend:
        backend = CpuBackend(config=config, pool=pool)
        assert backend.library.weir_select(level) == level
        return backend

    return build


def _row(blocks: list[int], start: int, count: int) -> RowWork:
    n = start + count
    return RowWork(range(count), start, list(blocks), True, Sampling(max_tokens=1), 0, range(n), 1, ring=list(blocks))

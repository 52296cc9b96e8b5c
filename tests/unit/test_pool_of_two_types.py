"""Two attention types over one pool: the shape's arithmetic, rooms, chunks that fill and empty, both orders of eviction."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir_server.contract import FULL, SLIDING, Geometry
from weir_server.kv.cache import Cache
from weir_server.kv.prefix import Chain, PrefixCache, domain
from weir_server.kv.shape import Need, Room, Shape

SIZE = 4
GEMMA = Shape(SIZE, full_per_chunk=5, ring_per_chunk=1, window=9, piece=7)
PAIR = Shape(SIZE, full_per_chunk=2, ring_per_chunk=3, window=9, piece=7)


def test_the_shape_comes_from_the_geometry_and_the_longest_piece() -> None:
    assert Shape.of(Geometry(1000, 16, {FULL: 1}), None, 512) == Shape(16, 1, 0, 0, 512)
    assert Shape.of(Geometry(1000, 16, {FULL: 5, SLIDING: 1}), 100, 64) == Shape(16, 5, 1, 100, 64)


@pytest.mark.parametrize(("shape", "tokens", "final", "need"), [
    (Shape(4), 9, 99, (3, 0)), (GEMMA, 9, 99, (3, 4)), (GEMMA, 9, 10, (3, 3)), (Shape(4, 0, 1, 9, 8), 9, 99, (0, 5)),
])  # fmt: skip
def test_a_ring_holds_window_and_piece_but_no_more_than_the_row_will_have(
    shape: Shape, tokens: int, final: int, need: tuple[int, int]
) -> None:
    assert shape.need(tokens, final) == need


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(1, 12))
def test_a_ring_never_loses_what_the_next_token_sees(size: int, window: int, piece: int, start: int) -> None:
    """Written before they are attended to: the window of a piece's first token is still there after its last one."""
    ring = Shape(size, 0, 1, window, piece).need(0, 10**6).ring
    slots: dict[int, int] = {}
    for position in range(start + piece):
        slots[position // size % ring * size + position % size] = position
    assert all(slots[p // size % ring * size + p % size] == p for p in range(max(0, start - window + 1), start + piece))


def test_room_takes_begun_chunks_first_and_then_whole_ones() -> None:
    room = GEMMA.room(3, full=2)
    assert room.blocks == 17
    assert room.take(Need(2)) == GEMMA.room(3) and room.take(Need(3)) == GEMMA.room(2, full=4)
    assert room.take(Need(3, 2)) == GEMMA.room(0, full=4)
    assert room.take(Need(3, 3)).chunks == -1, "all or nothing"
    assert room.give(GEMMA.room(1, full=-2)) == GEMMA.room(4)
    assert Room(5).take(Need(7)) == Room(-2)


@pytest.mark.parametrize(("shape", "chunks", "tokens"), [
    (Shape(4), 10, 40), (PAIR, 8, 32), (GEMMA, 8, 80), (GEMMA, 4, 12), (Shape(4, 0, 1, 9, 7), 4, 200),
    (Shape(4, 0, 1, 9, 7), 3, 12),
])  # fmt: skip
def test_what_a_pool_can_serve_is_the_longest_row_that_always_fits(shape: Shape, chunks: int, tokens: int) -> None:
    assert shape.servable(chunks, 200) == tokens
    assert shape.worst_chunks(tokens) <= chunks and (tokens == 200 or shape.worst_chunks(tokens + 1) > chunks)


def test_num_blocks_counts_blocks_of_the_whole_model() -> None:
    assert [shape.whole_chunks(10) for shape in (Shape(4), GEMMA, PAIR)] == [10, 12, 9]


def test_a_new_block_comes_from_the_fullest_chunk_and_an_emptied_one_goes_back() -> None:
    cache = Cache(12, 1000, GEMMA)
    first, second = cache.take(Need(5)).full, cache.take(Need(5)).full
    assert {b // 5 for b in first} | {b // 5 for b in second} == {2, 3} and cache.held == 2
    cache.release(first[:4], ())
    cache.release(second[:1], ())
    assert (cache.full.loose, cache.stranded_bytes) == (5, 1000)
    assert cache.full.allocate() == second[0], "from the fullest"
    cache.release(first[4:], ())
    assert (cache.held, cache.full.loose, cache.pool.free) == (1, 0, 9)


def test_a_chunk_belongs_to_one_type_at_a_time_and_changes_hands() -> None:
    cache = Cache(4, 1000, GEMMA)
    table = cache.take(Need(5, 1))
    assert {b // 5 for b in table.full}.isdisjoint(table.ring) and cache.pool.free == 0
    with pytest.raises(IndexError):
        cache.ring.allocate()
    cache.release(table.full, ())
    assert cache.ring.allocate() == table.full[0] // 5


@pytest.mark.parametrize("shape", [GEMMA, PAIR])
def test_what_a_row_frees_is_counted_exactly(shape: Shape) -> None:
    rng = random.Random(1)
    for _ in range(300):
        cache = Cache(60, 1000, shape)
        rows = [cache.take(Need(rng.randrange(6), rng.randrange(4))) for _ in range(6)]
        for row in rng.sample(rows, 2):
            cache.release(*row)
            rows.remove(row)
        for row in rows[:2]:
            room, frees = cache.room(58), cache.freed_by(*row)
            cache.release(*row)
            assert cache.room(58) == room.give(frees)
        assert not cache.full.faults() and not cache.ring.faults()


def test_two_rows_in_one_chunk_promise_less_than_they_free_together() -> None:
    cache = Cache(60, 1000, GEMMA)
    a, b = cache.take(Need(2)), cache.take(Need(3))
    promised = cache.room(58).give(cache.freed_by(*a)).give(cache.freed_by(*b))
    cache.release(*a)
    cache.release(*b)
    assert (promised.chunks, promised.full) == (57, 5) and cache.room(58) == GEMMA.room(58)


def test_sliding_layers_have_no_prefix_cache() -> None:
    assert Cache(9, 1000, GEMMA, PrefixCache()).prefix is None
    assert Cache(9, 1000, Shape(4, 0, 1, 9, 7), PrefixCache()).prefix is None


# ---------------------------------------------------------------- orders of eviction

def chains(newest: bool, *lengths: int) -> tuple[Cache, list[list[int]]]:
    """One-type cache in which rows of so many blocks each have been computed, published and released, in that order."""
    cache = Cache(2 + sum(lengths), 1000, Shape(SIZE), PrefixCache(newest))
    assert cache.prefix
    tables = []
    for n, blocks in enumerate(lengths):
        tokens = [100 * n + i for i in range(blocks * SIZE)]
        keys, table = Chain(domain("m", ""), SIZE), cache.take(Need(blocks)).full
        for i in range(blocks):
            cache.prefix.publish(keys, tokens, table, i)
        tables.append(table)
        cache.release(table, ())
    return cache, tables


def test_least_recently_used_goes_first_or_most_recently_freed_the_tail_of_a_chain_before_its_start() -> None:
    cache, (a, b) = chains(False, 3, 2)
    assert [cache.full.allocate() for _ in range(5)] == [*reversed(a), *reversed(b)]
    cache, (a, b) = chains(True, 3, 2)
    assert [cache.full.allocate() for _ in range(5)] == [*reversed(b), *reversed(a)]


@pytest.mark.parametrize("newest", [False, True])
def test_wanted_blocks_go_after_all_others_tail_first(newest: bool) -> None:
    cache, (a, b, c) = chains(newest, 3, 2, 2)
    prefix = cache.prefix
    assert prefix
    prefix.want(a[:2], row=1)
    prefix.want(a[:3], row=2)
    others = [*reversed(c), *reversed(b)] if newest else [*reversed(b), *reversed(c)]
    assert [cache.full.allocate() for _ in range(4)] == others and prefix.adopted_evictions == 0
    assert not prefix.faults()
    assert [cache.full.allocate() for _ in range(3)] == [*reversed(a)] and prefix.adopted_evictions == 3
    prefix.unwant(a, row=1)
    prefix.unwant(a, row=2)
    assert not prefix.faults() and not prefix._wanted


def test_blocks_are_wanted_until_the_last_row_that_waits_for_them_is_gone() -> None:
    cache, (a, b) = chains(False, 2, 2)
    prefix = cache.prefix
    assert prefix
    prefix.want(a, 1)
    prefix.want(a, 2)
    prefix.unwant(a, 1)
    for block in a:
        cache.full.share(block)
    cache.release(a, ())
    assert cache.full.allocate() == b[1], "still wanted, through being held and let go"
    prefix.unwant(a, 2)
    assert [cache.full.allocate() for _ in range(3)] == [b[0], a[1], a[0]] and prefix.adopted_evictions == 0


def test_an_orphan_is_never_taken_for_the_child_of_what_its_parents_block_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest first can evict a parent before its child. Same block, same digest, other content: the child must stay unfound."""
    from weir_server.kv import prefix as module

    monkeypatch.setattr(module, "digest", lambda parent, payload: payload[-8:])
    cache = Cache(2 + 2, 1000, Shape(SIZE), PrefixCache(newest_first=True))
    prefix = cache.prefix
    assert prefix
    keys, table = Chain(domain("m", ""), SIZE), cache.take(Need(2)).full
    for i in range(2):
        prefix.publish(keys, [1, 2, 3, 4, 9, 9, 9, 9], table, i)
    cache.release(table[1:], ())
    cache.release(table[:1], ())
    assert cache.full.allocate() == table[0], "the parent went first"
    other = Chain(domain("m", ""), SIZE)
    assert prefix.publish(other, [5, 6, 7, 8], table[:1], 0) == table[0]
    assert prefix.match(Chain(domain("m", ""), SIZE), [5, 6, 7, 8, 9, 9, 9, 9], 2) == table[:1]


def test_a_longer_match_is_found_from_what_is_known() -> None:
    cache, (a,) = chains(False, 3)
    assert cache.prefix
    tokens = list(range(12))
    keys = Chain(domain("m", ""), SIZE)
    assert cache.prefix.match(keys, tokens, 3, known=a[:2]) == a
    assert cache.prefix.match(keys, tokens, 2, known=a[:2]) == a[:2]

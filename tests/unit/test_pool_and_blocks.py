"""The chunk pool, the block allocator and the prefix cache, each by its own rules."""

from __future__ import annotations

import pytest

from weir_server.kv.cache import Cache
from weir_server.kv.pool import ChunkPool, usable_chunks
from weir_server.kv.prefix import Chain, PrefixCache, domain
from weir_server.kv.shape import Shape

SIZE = 4


def chain(salt: str = "") -> Chain:
    return Chain(domain("m", salt), SIZE)


class One(Cache):
    """A cache of full attention alone, by its allocator's words."""

    def __init__(self, chunks: int = 10, newest_first: bool = False) -> None:
        super().__init__(chunks, 100, Shape(SIZE), PrefixCache(newest_first))
        self.allocate, self.share, self.cold_of = self.full.allocate, self.full.share, self.full.cold_of
        self.prefix: PrefixCache

    @property
    def used(self) -> int:
        return self.full.used

    @property
    def free(self) -> int:
        return self.pool.free

    def alone(self, blocks: list[int]) -> int:
        return self.freed_by(blocks, ()).chunks

    def let_go(self, blocks: list[int]) -> None:
        self.release(blocks, ())


def allocator(chunks: int = 10) -> One:
    return One(chunks)


def publish(blocks: One, tokens: list[int], keys: Chain) -> list[int]:
    """A row that computed `tokens` and published all of its full blocks."""
    table = [blocks.allocate() for _ in range(blocks.shape.blocks(len(tokens)))]
    for i in range(len(tokens) // SIZE):
        assert blocks.prefix.publish(keys, tokens, table, i) == table[i]
    return table


def test_two_chunks_are_never_given_out() -> None:
    pool = ChunkPool(10, 100)
    assert pool.usable == usable_chunks(10) == 8
    assert sorted(pool.take() for _ in range(8)) == list(range(2, 10))
    with pytest.raises(IndexError):
        pool.take()


def test_a_pool_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="none to give"):
        ChunkPool(2, 100)


@pytest.mark.parametrize(("budget", "limit"), [(None, 8), (799, 7), (800, 8), (10_000, 8), (0, 0)])
def test_the_budget_is_bytes_rounded_down_to_whole_chunks(budget: int | None, limit: int) -> None:
    pool = ChunkPool(10, 100)
    pool.set_budget(budget, held=0)
    assert pool.limit == limit


def test_a_lowered_limit_holds_at_once_and_the_ceiling_follows_what_is_held() -> None:
    pool = ChunkPool(10, 100)
    pool.set_budget(300, held=5)
    assert (pool.limit, pool.ceiling) == (3, 8)
    pool.settle(held=4)
    assert pool.ceiling == 8
    pool.settle(held=3)
    assert pool.ceiling == 3
    pool.set_budget(600, held=3)
    assert (pool.limit, pool.ceiling) == (6, 6)


def test_touched_chunks_are_reused_before_untouched_ones() -> None:
    pool = ChunkPool(10, 100)
    first, second = pool.take(), pool.take()
    pool.give(first)
    pool.give(second)
    assert {pool.take(), pool.take()} == {first, second} and pool.resident == 2


def test_trim_gives_back_only_free_memory_above_the_limit() -> None:
    pool = ChunkPool(10, 100)
    held = [pool.take() for _ in range(6)]
    for chunk in held[2:]:
        pool.give(chunk)
    pool.set_budget(300, held=2)
    assert sorted(pool.trim()) == sorted(held[3:]) or len(pool.trim()) == 0
    assert pool.resident == 3
    assert pool.take() not in held[3:], "what was given back is the last to be used again"


def test_blocks_are_counted_by_reference() -> None:
    blocks = allocator()
    a = blocks.allocate()
    blocks.share(a)
    assert (blocks.used, blocks.alone([a])) == (1, 0)
    blocks.let_go([a])
    assert (blocks.used, blocks.alone([a])) == (1, 1)
    blocks.let_go([a])
    assert (blocks.used, blocks.free) == (0, 8)
    blocks.let_go([])


def test_a_published_block_stays_cached_and_is_found_again() -> None:
    blocks, tokens = allocator(), list(range(10))
    table = publish(blocks, tokens, chain())
    blocks.let_go(table)
    assert (blocks.used, blocks.cached, blocks.free) == (0, 2, 6)
    found = blocks.prefix.match(chain(), [*tokens[:8], 99], 2)
    assert found == table[:2] and blocks.cold_of(found) == 2
    blocks.share(found[0])
    assert (blocks.used, blocks.cached, blocks.cold_of(found)) == (1, 1, 1)


def test_a_match_needs_the_same_domain_the_same_start_and_no_more_than_asked() -> None:
    blocks, tokens = allocator(), list(range(8))
    table = publish(blocks, tokens, chain())
    assert blocks.prefix.match(chain("salt"), tokens, 2) == []
    assert blocks.prefix.match(chain(), [7, *tokens[1:]], 2) == []
    assert blocks.prefix.match(chain(), [*tokens[:5], 9, 9, 9], 2) == table[:1]
    assert blocks.prefix.match(chain(), tokens, 1) == table[:1]


def test_a_second_block_is_not_matched_behind_another_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colliding chains: same hash of the second block, same tokens in it, another first block."""
    from weir_server.kv import prefix

    monkeypatch.setattr(prefix, "digest", lambda parent, payload: payload[-8:])
    blocks = allocator()
    a = publish(blocks, [1, 2, 3, 4, 9, 9, 9, 9], chain())
    keys = chain()
    b = publish(blocks, [5, 6, 7, 8], keys)
    assert blocks.prefix.match(chain(), [5, 6, 7, 8, 9, 9, 9, 9], 2) == b
    table = [*b, blocks.allocate()]
    assert blocks.prefix.publish(keys, [5, 6, 7, 8, 9, 9, 9, 9], table, 1) is None, "the key is another's"
    assert blocks.prefix.match(chain(), [1, 2, 3, 4, 9, 9, 9, 9], 2) == a
    assert not blocks.prefix.faults()


def test_equal_content_points_to_the_older_block() -> None:
    blocks, tokens = allocator(), list(range(4))
    a = publish(blocks, tokens, chain())
    own = blocks.allocate()
    assert blocks.prefix.publish(chain(), tokens, [own], 0) == a[0]


def test_uninitialized_blocks_go_first_then_the_least_recent_tail() -> None:
    blocks = allocator(chunks=8)  # six usable
    old = publish(blocks, list(range(8)), chain())
    new = publish(blocks, list(range(50, 58)), chain())
    blocks.let_go(old)
    blocks.let_go(new)
    got = [blocks.allocate() for _ in range(5)]
    assert not set(got[:2]) & {*old, *new}
    assert got[2:] == [old[1], old[0], new[1]]
    assert blocks.prefix.evictions == 3 and not blocks.prefix.faults()


def test_a_prefix_that_was_used_again_is_recent_again() -> None:
    blocks = allocator(chunks=6)
    old = publish(blocks, list(range(8)), chain())
    new = publish(blocks, list(range(50, 58)), chain())
    blocks.let_go(old)
    blocks.let_go(new)
    blocks.share(old[0])
    blocks.let_go([old[0]])
    assert [blocks.allocate() for _ in range(4)] == [old[1], new[1], new[0], old[0]]


def test_nothing_is_left_to_find_when_all_is_evicted() -> None:
    blocks = allocator(chunks=4)
    blocks.let_go(publish(blocks, list(range(8)), chain()))
    blocks.allocate()
    blocks.allocate()
    assert blocks.prefix.match(chain(), list(range(8)), 2) == [] and blocks.prefix.cold == 0
    with pytest.raises(IndexError):
        blocks.allocate()


def test_a_lowered_budget_evicts_cold_blocks_and_keeps_held_ones() -> None:
    blocks = allocator()
    held = [blocks.allocate() for _ in range(3)]
    blocks.let_go(publish(blocks, list(range(16)), chain()))
    blocks.pool.set_budget(200, blocks.held)
    released = blocks.trim()
    assert len(released) == 4 and not set(released) & set(held)
    assert (blocks.used, blocks.cached, blocks.pool.resident) == (3, 0, 3)


def test_an_allocation_prefers_evicting_to_going_above_the_budget() -> None:
    blocks = allocator()
    cold = publish(blocks, list(range(8)), chain())
    blocks.let_go(cold)
    blocks.pool.set_budget(200, 0)
    assert [blocks.allocate(), blocks.allocate()] == [cold[1], cold[0]]
    blocks.allocate()  # a lone row's growth: the policy's decision, obeyed
    assert blocks.pool.in_use == 3

"""The prefix cache: computed blocks found again by what they hold. A best-effort layer over the block allocator.

A block's key is a chained 128-bit hash of its tokens and of everything before them, rooted in a domain (model, salt), so
one lookup a block decides. A hit must also hold the same tokens under the same parent: with that, induction over the chain
makes a collision of hashes a miss, never a wrong answer.

Published blocks are *hot* while a row holds them and *cold* (initialized and free) after. Cold blocks are evicted least
recently used first. Rows release their blocks tail first and hold a block only with all before it, so within a chain the
tail always goes first and no cached block ever outlives its parent. Blocks that a waiting row has matched are *wanted*: they
are evicted after all others. That row then finds less, and computes it again.

`newest_first` evicts what was freed last, as Hugging Face's block manager did: it spares old prefixes and orphans chains. Both
orders are right, since a parent is known by the number of its publication and not by its block, which may hold other content
by then.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple


class Key(NamedTuple):
    digest: bytes
    payload: bytes  # the block's own tokens, 8 bytes each


def domain(model: str, salt: str) -> str:
    """What separates caches: each part tagged, so that no salt can look like a model."""
    return repr((("model", model), ("salt", salt)))


def digest(parent: bytes, payload: bytes) -> bytes:
    return blake2b(payload, key=parent, digest_size=16, person=b"weir-kv-block").digest()


class Chain:
    """The keys of one row's full blocks, computed once and in order."""

    __slots__ = ("block_tokens", "domain", "keys")

    def __init__(self, domain: str, block_tokens: int) -> None:
        self.domain = domain
        self.block_tokens = block_tokens
        self.keys: list[Key] = []

    def upto(self, tokens: Sequence[int], count: int) -> list[Key]:
        """At least the first `count` keys of the row that holds `tokens`."""
        size = self.block_tokens
        while len(self.keys) < count:
            i = len(self.keys)
            parent = self.keys[-1].digest if i else blake2b(self.domain.encode(), digest_size=16).digest()
            payload = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            self.keys.append(Key(digest(parent, payload), payload))
        return self.keys


class _Entry(NamedTuple):
    key: Key
    parent: int | str  # number of the publication before it, or the domain
    number: int


class PrefixCache:
    """Which published block holds which key, which of them are cold, and which are wanted."""

    def __init__(self, newest_first: bool = False) -> None:
        self.newest_first = newest_first
        self.evictions = 0
        self.adopted_evictions = 0  # of which a waiting row had counted on
        self._published = 0
        self._block: dict[bytes, int] = {}
        self._entry: dict[int, _Entry] = {}
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._cold_wanted: OrderedDict[int, None] = OrderedDict()
        self._wanted: dict[int, set[int]] = {}  # by block: the waiting rows that have matched it

    @property
    def cold(self) -> int:
        return len(self._cold) + len(self._cold_wanted)

    def match(self, chain: Chain, tokens: Sequence[int], most: int, known: Sequence[int] = ()) -> list[int]:
        """Blocks that hold the first tokens of `tokens`, at most `most` of them; `known` are the first ones, matched before.

        Takes no reference.
        """
        found = list(known)
        parent: int | str = self._entry[found[-1]].number if found else chain.domain
        for i in range(len(found), most):
            key = chain.upto(tokens, i + 1)[i]
            block = self._block.get(key.digest, -1)
            if block < 0 or self._entry[block][:2] != (key, parent):
                break
            found.append(block)
            parent = self._entry[block].number
        return found

    def publish(self, chain: Chain, tokens: Sequence[int], table: Sequence[int], index: int) -> int | None:
        """Make block `index` of a row's table findable; it is computed, and so is all before it, which is published.

        Returns the block that stands for this content: the row's own, or an older one with the same content, which the row
        should hold instead. None if the key is taken by other content, or the block before is not published: then nothing
        behind it can be published either.
        """
        if index and table[index - 1] not in self._entry:
            return None
        key = chain.upto(tokens, index + 1)[index]
        parent: int | str = self._entry[table[index - 1]].number if index else chain.domain
        block = self._block.setdefault(key.digest, table[index])
        if block == table[index]:
            self._published += 1
            self._entry[block] = _Entry(key, parent, self._published)
            return block
        return block if self._entry[block][:2] == (key, parent) else None

    def want(self, blocks: Sequence[int], row: int) -> None:
        """The waiting row with this number counts on these blocks: the whole start of a chain."""
        for block in self.cooling(blocks):
            self._wanted.setdefault(block, set()).add(row)
            if self._cold.pop(block, 0) is None:
                self._cold_wanted[block] = None
            elif block in self._cold_wanted:
                self._cold_wanted.move_to_end(block)  # behind the tail that it is now wanted with

    def unwant(self, blocks: Sequence[int], row: int) -> None:
        """The row no longer waits. Blocks that have been evicted since are no error."""
        for block in self.cooling(blocks):
            rows = self._wanted.get(block)
            if rows is None or row not in rows:
                continue
            rows.discard(row)
            if not rows:
                del self._wanted[block]
                if self._cold_wanted.pop(block, 0) is None:
                    self._cold[block] = None

    def cooling(self, blocks: Sequence[int]) -> Iterable[int]:
        """Blocks of one chain in the order in which they must become cold, so that its tail is evicted first."""
        return blocks if self.newest_first else reversed(blocks)

    def warm(self, block: int) -> None:
        """A row holds the block again."""
        if self._cold.pop(block, 0) == 0:
            self._cold_wanted.pop(block, None)

    def cool(self, block: int) -> bool:
        """The last row let go of the block. Returns whether it stays cached."""
        if block not in self._entry:
            return False
        (self._cold_wanted if block in self._wanted else self._cold)[block] = None
        return True

    def evict(self) -> int:
        """Forget a cold block, wanted ones last, and return it. Raises KeyError if none is cold."""
        block, _ = (self._cold or self._cold_wanted).popitem(last=self.newest_first)
        if self._wanted.pop(block, None):
            self.adopted_evictions += 1
        del self._block[self._entry.pop(block).key.digest]
        self.evictions += 1
        return block

    def faults(self) -> list[str]:
        """What is wrong with the map (I4): it must be a bijection, and cold blocks must be published ones."""
        wrong = [f"block {b} is not found by its hash" for b, e in self._entry.items() if self._block.get(e.key.digest) != b]
        if len(self._block) != len(self._entry):
            wrong.append(f"{len(self._block)} hashes for {len(self._entry)} blocks")
        wrong += [f"cold block {b} is not published" for b in (*self._cold, *self._cold_wanted) if b not in self._entry]
        wrong += [f"block {b} is cold in the wrong tier" for b in self._cold if b in self._wanted]
        return wrong + [f"block {b} is cold in the wrong tier" for b in self._cold_wanted if b not in self._wanted]

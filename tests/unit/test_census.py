"""Names that others have, asked for many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weir_operator.io.kube import ApiError
from weir_operator.loops.census import FRESH_SECONDS, Census


class Lists:
    def __init__(self) -> None:
        self.answers: frozenset[str] | ApiError | None = frozenset({"taken"})
        self.asked: list[tuple[str, ...]] = []

    async def names(self, kind: str, namespace: str, selector: str, most: int) -> frozenset[str] | None:
        self.asked.append((kind, namespace, selector))
        await asyncio.sleep(0)
        if isinstance(self.answers, ApiError):
            raise self.answers
        return self.answers


@pytest.fixture
def lists() -> Any:
    return Lists()


async def test_one_list_answers_all_who_ask_within_its_time(lists: Any) -> None:
    now = [0.0]
    census = Census(lists, lambda: now[0])
    found = await asyncio.gather(*(census.free("Service", "ns", name) for name in ("a", "taken", "b")))
    assert found == [True, False, True] and lists.asked == [("Service", "ns", "weir.dev/managed!=true")]
    await census.free("Service", "other", "a")
    await census.free("ConfigMap", "ns", "a")
    assert len(lists.asked) == 3
    lists.answers, now[0] = frozenset({"a"}), FRESH_SECONDS
    assert not await census.free("Service", "ns", "a"), "what was made since is seen"


async def test_a_list_that_cannot_tell_frees_nothing(lists: Any) -> None:
    lists.answers = None
    assert not await Census(lists).free("ConfigMap", "crowded", "a")


async def test_of_a_kind_that_is_not_there_every_name_is_free(lists: Any) -> None:
    lists.answers = ApiError(404, "NotFound", "no such kind")
    assert await Census(lists).free("PodMonitor", "ns", "a")


async def test_a_refusal_reaches_everybody_and_is_not_kept(lists: Any) -> None:
    census = Census(lists)
    lists.answers = ApiError(403, "Forbidden", "no")
    found = await asyncio.gather(*(census.free("Service", "ns", name) for name in "ab"), return_exceptions=True)
    assert [type(e) for e in found] == [ApiError, ApiError]
    lists.answers = frozenset()
    assert await census.free("Service", "ns", "a")

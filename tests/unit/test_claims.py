"""Whose a resource is, where several operators serve its namespace: the rule alone, and what a pass makes of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from test_operator_parts import RAW, Bench

from weir_operator.api import names
from weir_operator.loops.claims import ANSWERS, ASK_SECONDS, REST_SECONDS, Claims, Stand
from weir_operator.loops.lease import LEASE_SECONDS, RETRY_SECONDS, TURN_SECONDS
from weir_operator.loops.operator import take_over
from weir_operator.loops.queue import Retry, WorkQueue


class Operators:
    """Some over one resource, whose status is one word. Each passes over it when it is told to, as it saw it last; a write of
    what changed since is refused, and shows it. The clock is the test's."""

    def __init__(self, *ones: str) -> None:
        self.now, self.said, self.writes = 0.0, (0, ""), Counter[str]()
        self.all = {name: Claims(name, lambda: self.now) for name in ones}
        self.seen = dict.fromkeys(ones, self.said)

    def looks(self, name: str) -> None:
        self.seen[name] = self.said

    def passes(self, name: str, looks: bool = True) -> Stand:
        if looks:
            self.looks(name)
        claims, (version, holder) = self.all[name], self.seen[name]
        stand = claims.look("ns/chat", holder)
        if stand is Stand.ASK or (stand is Stand.OURS and holder != name):
            if version == self.said[0]:
                self.said = (version + 1, name)
                claims.wrote("ns/chat", holder)
                self.writes[name] += 1
            self.looks(name)
        return stand

    def acting(self) -> set[str]:
        """Who would touch the children now, if everybody saw what there is."""
        return {name for name, claims in self.all.items() if claims.holds("ns/chat") and self.said[1] == name}


def taken_over() -> Operators:
    """What a had is b's, which asked for it; a has not looked since."""
    both = Operators("a", "b")
    both.passes("a")
    both.passes("b")
    both.now += ASK_SECONDS
    both.passes("b")
    return both


def test_one_alone_holds_what_it_sees_and_writes_its_name_once() -> None:
    alone = Operators("a")
    assert [alone.passes("a") for _ in range(3)] == [Stand.OURS] * 3
    assert alone.writes["a"] == 1 and alone.all["a"].rival("ns/chat") == ""


def test_of_two_that_begin_at_once_one_writes_first_and_the_other_asks() -> None:
    both = Operators("a", "b")
    both.passes("a")
    assert both.passes("b", looks=False) is Stand.OURS, "as far as it knows"
    assert both.writes["b"] == 0 and not both.all["b"].holds("ns/chat"), "it is refused"
    assert both.passes("b") is Stand.ASK
    both.passes("a")
    assert both.passes("b") is Stand.LEAVE and both.writes == {"a": 2, "b": 1}


def test_who_lives_keeps_what_it_has_and_knows_who_asked() -> None:
    both = Operators("a", "b")
    both.passes("a")
    assert both.passes("b") is Stand.ASK
    assert both.passes("b") is Stand.WAIT
    assert both.passes("a") is Stand.OURS and both.all["a"].rival("ns/chat") == "b"
    for seconds in (0, ASK_SECONDS, REST_SECONDS - ASK_SECONDS - 1):
        both.now += seconds
        assert (both.passes("b"), both.passes("a")) == (Stand.LEAVE, Stand.OURS)
    assert both.writes == {"a": 2, "b": 1} and both.acting() == {"a"}
    both.now += 2
    assert both.passes("b") is Stand.ASK, "and asks again, once in a while"
    both.passes("a")
    both.now += 2 * REST_SECONDS
    both.passes("a")
    assert both.all["a"].rival("ns/chat") == "", "who asks no more is no rival"


def test_who_is_gone_loses_what_it_had_once_it_had_time_to_answer() -> None:
    both = Operators("a", "b")
    both.passes("a")
    both.passes("b")
    both.now += ASK_SECONDS - 1
    assert both.passes("b") is Stand.WAIT and both.acting() == set()
    both.now += 1
    assert both.passes("b") is Stand.OURS and both.acting() == {"b"}


def test_an_operator_that_begins_to_lead_asks_for_what_another_took_meanwhile() -> None:
    both = taken_over()
    both.all["a"].forget_all()
    assert both.passes("a") is Stand.ASK
    both.passes("b")
    assert both.passes("a") is Stand.LEAVE and both.acting() == {"b"}


def test_two_who_both_believe_that_they_hold_it_do_not_go_on_for_ever() -> None:
    """One was cut off from its watches for longer than it is asked for, and never heard of it."""
    both = taken_over()
    for _ in range(50):
        both.now += 1
        both.passes("a")
        both.passes("b")
    assert sum(both.writes.values()) <= 2 + 2 * ANSWERS + 2
    assert len(both.acting()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_one_is_left_and_the_rest_is_quiet(seed: int) -> None:
    """Some come, go and come back, all look at any time; once nobody comes or goes any more, one holds it and hardly anybody
    writes."""
    chance, three = random.Random(seed), Operators("a", "b", "c")
    alive = {"a"}
    for _ in range(400):
        three.now += chance.expovariate(1 / 5.0)
        if chance.random() < 0.05:
            one = chance.choice("abc")
            alive ^= {one}
            three.all[one].forget_all()  # a new process, or a new time as leader
        if alive:
            three.passes(chance.choice(sorted(alive)), looks=chance.random() < 0.7)
    alive = alive or {"b"}
    for quiet in range(2):
        before = sum(three.writes.values())
        for _ in range(600):
            three.now += 2.0
            three.passes(chance.choice(sorted(alive)), looks=chance.random() < 0.9)
        if quiet:  # 1200 s: each of the others asks at most three times, and is answered
            assert sum(three.writes.values()) - before <= 2 * 3 * (len(alive) - 1)
    assert len(three.acting() & alive) == 1


# ---------------------------------------------------------------- in a pass

OTHERS = {**RAW, "status": {"operator": "elsewhere", "desiredReplicas": 3}}


def wrote(bench: Bench) -> list[Any]:
    said, bench.api.statuses = bench.api.statuses, []
    return said


async def test_a_pass_over_anothers_resource_asks_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, now = Bench(), [1000.0]
    monkeypatch.setattr(bench.reconciler.claims, "_clock", lambda: now[0])
    bench.api.fails = AssertionError("a child was written")
    bench.store.put(names.KIND, OTHERS)
    with pytest.raises(Retry, match="another operator's"):
        await bench.reconciler("ns/chat")
    assert wrote(bench) == [{"operator": "default"}]
    bench.store.put(names.KIND, OTHERS)  # it answers
    assert await bench.reconciler("ns/chat") == 0.0
    now[0] += REST_SECONDS - 1
    assert await bench.reconciler("ns/chat") == 0.0
    assert wrote(bench) == [] and not bench.reconciler.claims.holds("ns/chat")


async def test_a_pass_over_our_own_that_another_asks_for_says_so_and_writes_its_name_back() -> None:
    bench = Bench()
    bench.store.put(names.KIND, RAW)
    await bench.reconciler("ns/chat")
    assert wrote(bench)[-1]["operator"] == "default"
    was = dict(bench.reconciler.children._applied["ns/chat"])
    bench.store.put(names.KIND, OTHERS)
    await bench.reconciler("ns/chat")
    [said] = wrote(bench)
    contested = next(c for c in said["conditions"] if c["type"] == "Contested")
    assert said["operator"] == "default" and contested["status"] == "True" and "operator of elsewhere" in contested["message"]
    now = bench.reconciler.children._applied["ns/chat"]
    assert now.keys() == was.keys()
    assert {where[0] for where in now if now[where] is not was[where]} == {"Secret"}, "which alone no watch tells of"
    take_over(bench.reconciler, WorkQueue(bench.reconciler))
    assert not bench.reconciler.claims.holds("ns/chat"), "another may have taken it since"


def test_who_is_asked_has_time_for_a_take_over_of_its_own() -> None:
    assert ASK_SECONDS > LEASE_SECONDS + RETRY_SECONDS + TURN_SECONDS

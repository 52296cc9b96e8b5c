"""What goes into the next step. decide() is a pure function of a few numbers per row; its rules, each with its bound:

- Every decoding row feeds one token; prompts share what is left, up to the prefill chunk, in the same forward; then rows that
  wait, in the order of the queue (`fifo`). `prefill_first` gives prompts that have begun their tokens before decodes get
  theirs, and always the large chunk: decodes wait no longer than those prompts take, since nothing joins meanwhile.
- The chunk is small beside rows that have more than BEGINNING tokens. Who came together also begins together: with fewer
  shown, all wait for large chunks, BEGINNING times at most, where each would wait for many small ones.
- A prefill that decodes have kept from its share, min(chunk, half the token budget), for `grant` steps gets it in the next
  one, so a prompt of C shares is through within C·(grant + 1) steps of its admission.
- Running rows take their blocks before rows that wait do. If there are too few, rows are preempted (policy.pressure) and
  nobody is admitted, all in the step that is short.
- A head of the queue may drive out strictly lower lanes (policy.pressure); then it alone joins. Else who joins: policy.admit.
"""

from __future__ import annotations

from itertools import chain

from weir_server.policy.admit import StepTokens, admit
from weir_server.policy.limits import BEGINNING
from weir_server.policy.pressure import make_way, margin, room_beside, stalled_victims
from weir_server.policy.state import State, StepPlan


def decide(state: State) -> StepPlan:
    limits, waiting, queued = state.limits, iter(state.waiting), state.queued
    gone: tuple[int, ...] = ()
    cause = bound = None
    admitted: tuple[tuple[int, int], ...] = ()
    if state.short and (gone := stalled_victims(state.running, state.growth, limits.pressure)):
        cause = "kv"
    elif state.contested:
        head = next(waiting)
        gone, cause = make_way(state, head)
        waiting, queued = chain((head,), waiting), 1 if gone else queued
    rows = [(i, row) for i, row in enumerate(state.running) if i not in gone]

    step = StepTokens(limits, decoding=any(not row.left and row.generated > BEGINNING for _, row in rows))
    parked = next((row.left for _, row in rows if row.left), 0)
    share = 0 if limits.prefill_first else min(parked, step.chunk, max(1, limits.tokens // 2))
    reserved = share if 0 < limits.grant <= state.starved else 0
    take = [0] * len(state.running)
    for prompts in (True, False) if limits.prefill_first else (False, True):
        for i, row in rows:
            if bool(row.left) is prompts:
                take[i] = step.prompt(row.left, row.pages) if prompts else step.decode(row.pages, reserved)

    if cause != "kv":
        room, keep = room_beside(state, gone), margin(state, gone)
        admitted, bound = admit(waiting, queued, state.rows - len(rows), room, keep, step, alone=not rows)
    if bound is None and len(admitted) < state.queued:
        bound = "slots" if cause == "slots" else "kv"
    starved = state.starved + 1 if step.prompt_tokens < share else 0
    return StepPlan(tuple(take), admitted, gone, cause, bound, starved, reserved > 0)

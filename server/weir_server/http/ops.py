"""The routes that look: models, tokens, health, slots, cache, requests, metrics."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from weir_server.http.ask import encode
from weir_server.http.errors import ApiError, bad, json_response
from weir_server.http.generate import read_json_body
from weir_server.http.keys import SERVICE
from weir_server.http.live import Call, LiveRow
from weir_server.http.metrics import render
from weir_server.http.schema import LANES, check_ids, parse_body
from weir_server.http.service import Service
from weir_server.policy.queue import effective_lane

REGISTRY = web.AppKey("registry", CollectorRegistry)
LANE_NAMES = {lane: name for name, lane in LANES.items()}


async def health(request: web.Request) -> web.Response:
    """Is the engine alive? Saturation and draining are no illness."""
    service = request.app[SERVICE]
    if service.failed is not None:
        return json_response({"status": "error", "error": {"message": service.failed, "type": "server_error"}}, 503)
    load, seen = service.book.load, service.seen
    completed = seen.finished["stop"] + seen.finished["length"]
    batch = {"active_sequences": load.running, "queued_requests": load.waiting, "total_completed": completed}
    return json_response({"status": "ok", "batch": batch, "context_per_slot": service.ready.context_per_slot})


async def ready(request: web.Request) -> web.Response:
    """May the Service send traffic here? Never false because of load."""
    service = request.app[SERVICE]
    if service.failed is not None:
        return json_response({"ready": False, "reason": "the engine is gone"}, 503)
    if service.leaving or service.board.draining:
        return json_response({"ready": False, "reason": "draining"}, 503)
    return json_response({"ready": True})


async def slots(request: web.Request) -> web.Response:
    """One entry for each slot of the envelope; those above the knob are disabled."""
    service = request.app[SERVICE]
    live, batch = service.book.slots, service.effective.max_batch_size
    out = []
    for i in range(max(service.board.envelope.max_batch_size[1], *[s + 1 for s in live], 0)):
        row = live.get(i)
        entry: dict[str, Any] = {
            "id": i, "n_ctx": service.ready.context_per_slot, "disabled": i >= batch,
            "is_processing": row is not None, "id_task": None, "n_decoded": 0,
        }  # fmt: skip
        if row is not None:
            entry |= {"id_task": row.call.name, "n_decoded": row.text.tokens}
        out.append(entry)
    return json_response(out)


async def models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    """The same by its id, which may hold slashes, plain or encoded."""
    service, name = request.app[SERVICE], request.match_info["name"]
    if name != service.model.name:
        raise ApiError(404, f"The model {name[:100]!r} does not exist here.", code="model_not_found", param="model")
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    created = int(service.started.timestamp())
    context = service.ready.context_per_slot
    return {"id": service.model.name, "object": "model", "created": created, "owned_by": "weir", "max_model_len": context}


async def tokenize(request: web.Request) -> web.Response:
    """`prompt` (as vLLM has it) or `content` (as llama.cpp has it); `add_special_tokens` false by default."""
    service = request.app[SERVICE]
    body = parse_body(await read_json_body(request))
    text = body.get("prompt", body.get("content"))
    if not isinstance(text, str):
        raise bad("prompt", "prompt (or content) must be a string.")
    special = body.get("add_special_tokens", body.get("add_special", False))
    if not isinstance(special, bool):
        raise bad("add_special_tokens", "add_special_tokens must be true or false.")
    (ids,) = await encode(service, [text], special)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.ready.context_per_slot})


async def detokenize(request: web.Request) -> web.Response:
    """Special tokens by name; ids that the tokenizer lacks add nothing. The text is there under vLLM's and llama.cpp's name."""
    service = request.app[SERVICE]
    raw = await read_json_body(request)
    ids = parse_body(raw).get("tokens")

    def text_of() -> str:
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise bad("tokens", "tokens must be a list of integers.")
        check_ids("tokens", ids, service.vocab)
        return service.model.tokenizer.decode(ids)

    text = await service.off_loop(len(raw), text_of)
    return json_response({"prompt": text, "content": text})


async def cache_stats(request: web.Request) -> web.Response:
    """The KV pool: its blocks, its bytes, the budget, the prefix cache and the swap pool."""
    service = request.app[SERVICE]
    s, ready_ = service.book.stats, service.ready
    g, free = ready_.geometry, service.free_chunks
    return json_response({
        "block_tokens": g.block_tokens, "blocks_per_chunk": g.blocks_per_chunk, "chunk_bytes": g.chunk_bytes,
        "usable_blocks": ready_.usable_blocks, "used_blocks": s.kv_blocks_used, "cached_blocks": s.kv_blocks_cached,
        "allocated_blocks": s.kv_blocks_used + s.kv_blocks_cached, "live_blocks": s.kv_blocks_used,
        "free_blocks": {kind: s.kv_free_by_type.get(kind, free * n) for kind, n in g.blocks_per_chunk.items()},
        "reserved_bytes": ready_.usable_blocks * g.chunk_bytes, "resident_bytes": s.kv_resident_bytes,
        "used_bytes": s.kv_used_bytes, "cached_bytes": s.kv_cached_bytes, "stranded_bytes": s.kv_stranded_bytes,
        "budget_bytes": service.effective.kv_cache_budget,
        "queried_tokens": s.prefix_queries, "hit_tokens": s.prefix_hits, "evictions": s.prefix_evictions,
        "adopted_evictions": s.adopted_evictions,
        "swap_bytes": ready_.swap_bytes, "swap_used_bytes": s.swap_used_bytes, "offloads": s.offloads,
        "restored_tokens": s.restored_tokens,
    })  # fmt: skip


async def request_get(request: web.Request) -> web.Response:
    """What a request is doing, and if it is not running, what it waits for."""
    service, call = request.app[SERVICE], _find(request)
    now, lane, deadline = service.now(), call.submits[0].lane, call.submits[0].deadline
    waiting = [row for row in call.rows if not row.admitted and row.reason is None]
    return json_response({
        "id": call.name, "label": call.label, "age_seconds": now - call.arrived, "prompt_tokens": call.prompt_tokens,
        "priority": LANE_NAMES[lane], "seconds_left": None if deadline is None else max(0.0, deadline - now),
        "waits_for": service.book.load.bound if waiting else None,
        "rows": [_row(service, row, now) for row in call.rows],
    })  # fmt: skip


def _row(service: Service, row: LiveRow, now: float) -> dict[str, Any]:
    """A row, and if it waits: its place in the queue, and the KV memory that it needs beside what there is."""
    state = row.reason or ("running" if row.admitted else "waiting")
    known = {"index": row.index, "state": state, "generated_tokens": row.text.tokens}
    if state != "waiting":
        return known
    stats, prompt = service.book.stats, len(row.submit.prompt)
    return known | {
        "lane": LANE_NAMES[effective_lane(row, now)], "rows_ahead": service.book.ahead(row, now), "tokens_needed": prompt,
        "kv_bytes_needed": service.book.needs(prompt, row.submit.sampling.max_tokens),
        "kv_bytes_used": stats.kv_used_bytes, "kv_bytes_cached": stats.kv_cached_bytes,
        "kv_budget_bytes": service.effective.kv_cache_budget,
    }  # fmt: skip


async def request_delete(request: web.Request) -> web.Response:
    """Cancel a request, whatever it is doing."""
    call = _find(request)
    call.cancelled_by_request = True
    request.app[SERVICE].book.cancel(call)
    return json_response({"id": call.name, "cancelled": True})


def _find(request: web.Request) -> Call:
    """By the id in our answers (with or without its prefix), or by the client's own if one live request has it."""
    book, wanted = request.app[SERVICE].book, request.match_info["id"]
    if (call := book.calls.get(wanted.rpartition("-")[2])) is not None:
        return call
    labelled = [c for c in book.calls.values() if c.label == wanted]
    if len(labelled) > 1:
        raise ApiError(409, f"{len(labelled)} live requests have the id {wanted[:128]!r}.", code="ambiguous")
    if not labelled:
        raise ApiError(404, f"No live request {wanted[:128]!r}.", code="not_found")
    return labelled[0]


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text, or OpenMetrics where it is asked for."""
    body, kind = render(request.app[REGISTRY], request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": kind})


LOOKING = [
    web.get("/health", health), web.get("/ready", ready), web.get("/slots", slots),
    web.get("/v1/models", models), web.get("/v1/models/{name:.+}", model),
    web.post("/tokenize", tokenize), web.post("/detokenize", detokenize), web.get("/v1/cache/stats", cache_stats),
    web.get("/v1/requests/{id}", request_get), web.delete("/v1/requests/{id}", request_delete),
]  # fmt: skip
METRICS = [web.get("/metrics", metrics)]

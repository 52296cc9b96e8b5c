"""The routes that look: models, tokens, health, slots, cache, requests, metrics."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from weir_server.http.ask import encode
from weir_server.http.errors import ApiError, bad, json_response
from weir_server.http.generate import read_json_body
from weir_server.http.keys import SERVICE
from weir_server.http.live import Call
from weir_server.http.metrics import render
from weir_server.http.schema import check_ids, parse_body
from weir_server.http.service import Service

REGISTRY = web.AppKey("registry", CollectorRegistry)


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
    stats, ready_ = service.book.stats, service.ready
    return json_response({
        "block_tokens": ready_.geometry.block_tokens, "usable_blocks": ready_.usable_blocks,
        "used_blocks": stats.kv_blocks_used, "cached_blocks": stats.kv_blocks_cached,
        "used_bytes": stats.kv_used_bytes, "cached_bytes": stats.kv_cached_bytes,
        "budget_bytes": service.effective.kv_cache_budget,
        "queried_tokens": stats.prefix_queries, "hit_tokens": stats.prefix_hits, "evictions": stats.prefix_evictions,
    })  # fmt: skip


async def request_get(request: web.Request) -> web.Response:
    """What a request is doing, and if it is not running, what it waits for."""
    service, call = request.app[SERVICE], _find(request)
    rows = []
    for row in call.rows:
        state = row.reason or ("running" if row.admitted else "waiting")
        rows.append({"index": row.index, "state": state, "generated_tokens": row.text.tokens})
    waits = any(not row.admitted and row.reason is None for row in call.rows)
    load, now = service.book.load, service.now()
    known = {"id": call.name, "label": call.label, "age_seconds": now - call.arrived, "prompt_tokens": call.prompt_tokens}
    ahead = sum(not r.admitted and r.seen.arrived < call.arrived for r in service.book.rows.values())
    waiting = {"waits_for": load.bound if waits else None, "rows_ahead": ahead if waits else 0}
    return json_response({**known, "rows": rows, **waiting})


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

"""HTTP routes of llama-server's slots: listing them; saving, restoring and erasing what they have read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request

from gateway.apis.saved_slots import SavedSlots, unusable
from gateway.app.openapi import refuses
from gateway.app.state import Gateway, gateway_of
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.native import SlotFile
from gateway.transport.keys import client_of, owner_of, private_salt
from gateway.transport.streaming import run_until_disconnect
from protos import engine_pb2

router = APIRouter()
T = TypeVar("T")


@router.get("/slots", **refuses(401, 503))
async def slots(request: Request) -> list[dict[str, Any]]:
    """Lists as many slots as requests can run at once, those of running requests first."""
    gateway = gateway_of(request)
    length, running = gateway.model().max_context_length, (await gateway.engine.load()).num_running_reqs
    return [
        {"id": number, "n_ctx": length, "is_processing": number < running}
        for number in range(await num_slots(gateway))
    ]


@router.post("/slots/{id_slot}", **refuses(400, 401, 429, 500, 501, 503))
async def slot_action(
    request: Request,
    id_slot: int,
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    body: SlotFile | None = None,
) -> dict[str, Any]:
    """Saves a slot's context by name, restores one, or erases it, as llama-server."""
    gateway = gateway_of(request)
    kept = saved_slots(gateway, request)
    if kept is None:
        raise ApiError(501, "this server saves no slots; needed: --slot-save-path DIR", code="not_supported")
    count = await num_slots(gateway)
    if not 0 <= id_slot < count:
        raise bad_request(f"slot {id_slot} does not exist; allowed: 0 to {count - 1}", "id_slot")
    if action == "erase":
        return {"id_slot": id_slot, "n_erased": await _blocking(lambda: kept.erase(id_slot))}
    if body is None or body.filename is None:
        raise bad_request("'filename' is missing: which file to save to, or to restore from", "filename")
    name, begin = body.filename, time.perf_counter()

    def timings() -> dict[str, float]:
        return {f"{action}_ms": (time.perf_counter() - begin) * 1e3}

    if action == "save":
        tokens, nbytes = await _blocking(lambda: kept.save(id_slot, name))
        answer = {"id_slot": id_slot, "filename": name, "n_saved": tokens, "n_written": nbytes}
        return answer | {"timings": timings()}
    token_ids, nbytes = await _blocking(lambda: kept.load(name))
    await run_until_disconnect(request, _compute(gateway, request, token_ids))
    await _blocking(lambda: kept.note(id_slot, token_ids))
    answer = {"id_slot": id_slot, "filename": name, "n_restored": len(token_ids), "n_read": nbytes}
    return answer | {"timings": timings()}


async def num_slots(gateway: Gateway) -> int:
    """Returns how many slots there are: as many as requests can run at once."""
    load = await gateway.engine.load()
    return max(load.max_running_requests, load.num_running_reqs)


def saved_slots(gateway: Gateway, request: Request) -> SavedSlots | None:
    """Returns the contexts of a request's client; None: the server saves none."""
    directory = gateway.config.gateway.slot_save_path
    if not directory:
        return None
    return SavedSlots(Path(directory), owner_of(request.scope)[0], gateway.model().fingerprint)


async def _blocking(call: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(call)
    except OSError as error:
        raise unusable(error) from None


async def _compute(gateway: Gateway, request: Request, token_ids: Sequence[int]) -> None:
    """Lets the engine fetch or compute a context, and one token more, which is dropped."""
    client = client_of(request.scope)
    is_private = gateway.config.gateway.cache_isolation == "key"
    most = gateway.model().max_context_length - 1
    asked = engine_pb2.GenerateRequest(
        request_id=f"slot-{request.state.request_id}",
        tokenized=engine_pb2.TokenizedInput(input_ids=token_ids[:most]),
        sampling_params=engine_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
        fairness_id=client,
        cache_salt=private_salt(request.scope, "") if is_private else "",
    )
    gateway.admission.enter(client)
    try:
        async for response in gateway.engine.generate(asked, None):
            if response.complete.finish_reason not in ("", "stop", "length"):
                raise ApiError(503, "the engine could not restore the context", code="engine_unavailable")
    finally:
        gateway.admission.leave(client)
    key_use = getattr(request.state, "key_use", None)
    if key_use is not None:
        key_use.took(len(token_ids))

"""The port of several models: its own paths, and the way of all others to the model that they name."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, Gauge
from pydantic import BaseModel

from app.swap.child import ModelProcess
from app.swap.pool import CannotLoad, ModelPool, Slot
from app.swap.proxy import Proxy, model_in
from app.swap.settings import ModelsConfig
from gateway.app.application import HeadMiddleware, add_web_middleware, is_open
from gateway.schemas.errors import ApiError, bad_request, install_error_handlers
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.admission import BodyReceiver
from gateway.transport.keys import KeyMiddleware
from gateway.transport.streaming import ClientGone
from gateway.web.pages import page_router
from moebius import __version__
from moebius.network.api_keys import ApiKeys, KeyLimits

_MIB = 2**20
_ALL = ["GET", "POST", "DELETE", "PUT", "PATCH"]
_CLIENT_CLOSED = 499
# As llama-server's router calls them.
_STATES = {"leaving": "loaded"}


class _NewWeights(BaseModel):
    """The body of SGLang's request to read weights again."""

    model_path: str


class Models:
    """What the routes share."""

    def __init__(self, config: ModelsConfig, processes: Mapping[str, ModelProcess], pool: ModelPool) -> None:
        self.config, self.processes, self.pool = config, processes, pool
        shared = config.shared
        self.created = int(time.time())
        self.metrics = GatewayMetrics()
        images = shared.images
        self._image_bytes = int(images.max_images_per_request * images.max_image_mib * _MIB * 4 / 3)
        self._bodies = BodyReceiver(int(shared.gateway.max_body_mib * _MIB))
        urls = {name: process.base_url for name, process in processes.items()}
        self.proxy = Proxy(pool, urls, lambda name: processes[name].progress, shared.gateway.sse_keepalive_s)
        states = Gauge(
            "moebius:model_loaded",
            "1 while the model is in memory of GPUs",
            ["model_name"],
            registry=self.metrics.registry,
        )
        for slot in pool.slots.values():
            states.labels(slot.name).set_function(partial(_loaded, slot))

    def name_for(self, asked: str | None) -> str:
        """Returns the model that a client means. Raises ApiError 404 naming those that exist."""
        name = self.config.name_for(asked)
        if name is None:
            raise ApiError(
                404,
                f"the model {str(asked)[:100]!r} does not exist; there are {', '.join(self.pool.slots)}",
                param="model",
                code="model_not_found",
            )
        return name

    def card(self, slot: Slot) -> dict[str, Any]:
        """Returns the entry of /v1/models."""
        progress = self.processes[slot.name].progress
        status = {
            "value": _STATES.get(slot.state, slot.state),
            **({"progress": progress} if progress else {}),
        }
        card = {"id": slot.name, "object": "model", "created": self.created, "owned_by": "moebius"}
        return {**card, "status": status}

    async def pass_on(self, request: Request) -> Response:
        """Returns the answer of the model that the query, the path or the body names, else of the first."""
        async with self._bodies.receive(request, self._image_bytes) as body:
            asked = request.query_params.get("model")
            if asked is None and "json" in request.headers.get("content-type", ""):
                asked = model_in(b"".join(body))
            name = self.name_for(asked)
            return await self.proxy.answer(request, name, body)


def _loaded(slot: Slot) -> float:
    return float(slot.state == "loaded")


def create_models_app(
    config: ModelsConfig, processes: Mapping[str, ModelProcess], pool: ModelPool
) -> FastAPI:
    """Returns the application; when it ends, so do all models. Raises ConfigError for keys."""
    models = Models(config, processes, pool)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await models.proxy.close()
        await pool.close()

    app = FastAPI(title="Moebius", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models = models
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    _add_state(app, models)
    _add_operations(app, models)
    app.include_router(page_router(config.shared.gateway.web_page))
    app.add_api_route("/{path:path}", models.pass_on, methods=_ALL, include_in_schema=False)
    _add_middleware(app, config, models)
    return app


def _add_state(app: FastAPI, models: Models) -> None:
    """Adds what answers without loading a model."""
    slots = models.pool.slots

    # All paths that need no key are answered here: a model is loaded for those who have one.
    @app.get("/health", response_class=Response)
    @app.get("/v1/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    @app.post("/ping", response_class=Response)
    async def health() -> Response:
        """Answers 200 while this process runs."""
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Answers 200: a request sent now is answered, once its model is loaded."""
        return {"status": "ready", "models": {slot.name: slot.state for slot in slots.values()}}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Returns the version of this software."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Returns Prometheus text of this port; with `model`, that model's own, if it is loaded."""
        asked = request.query_params.get("model")
        if asked is None:
            return Response(models.metrics.render(), media_type=CONTENT_TYPE_LATEST)
        name = models.name_for(asked)
        if slots[name].state != "loaded":
            raise ApiError(503, f"{name} is not loaded", code="model_not_loaded")
        return await models.proxy.answer(request, name, ())

    @app.get("/models")
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """Lists all models, loaded or not, with llama-server's `status`."""
        return {"object": "list", "data": [models.card(slot) for slot in slots.values()]}

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        """Returns one model, loaded or not."""
        return models.card(slots[models.name_for(model)])

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """Lists all models in Ollama's shape."""
        return {"models": [{"name": f"{name}:latest", "model": f"{name}:latest"} for name in slots]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        """Lists the loaded models in Ollama's shape."""
        loaded = [slot.name for slot in slots.values() if slot.state in ("loaded", "leaving")]
        return {"models": [{"name": f"{name}:latest", "model": f"{name}:latest"} for name in loaded]}


def _add_operations(app: FastAPI, models: Models) -> None:
    """Adds what operators do to a model, `?model=NAME`; without a name to all that are loaded."""
    pool = models.pool

    def chosen(request: Request) -> list[str]:
        asked = request.query_params.get("model")
        return [models.name_for(asked)] if asked is not None else list(pool.slots)

    async def loaded(loading: Awaitable[None]) -> None:
        try:
            await loading
        except CannotLoad as error:
            raise ApiError(503, str(error), code="model_not_loaded") from None

    @app.post("/sleep")
    async def sleep(request: Request) -> dict[str, Any]:
        """Puts models to sleep once their requests have ended, which force cannot hurry here."""
        if request.query_params.get("mode", "wait") != "wait":
            raise bad_request("'mode' is not wait, which is all that several models take", "mode")
        for name in chosen(request):
            await pool.put_to_sleep(name)
        return {"success": True, "is_sleeping": True}

    @app.post("/unload")
    async def unload(request: Request) -> dict[str, Any]:
        """Ends the processes of models once their requests have ended: experts leave the RAM, too."""
        for name in chosen(request):
            await pool.unload(name)
        return {"success": True}

    @app.post("/reload")
    async def reload(request: Request) -> dict[str, Any]:
        """Reads a model's files again, once its requests have ended; later ones wait for the new model."""
        name = models.name_for(request.query_params.get("model"))
        await loaded(pool.reload(name))
        return {"success": True, "message": f"{name} has been read again"}

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request, body: _NewWeights) -> dict[str, Any]:
        """Does what `/reload` does, in SGLang's shape; the files are those of the settings."""
        path = models.config.models[models.name_for(request.query_params.get("model"))].model.model
        if body.model_path != path:
            raise bad_request(f"'model_path' is {body.model_path[:200]!r}; allowed is {path!r}", "model_path")
        return {**await reload(request), "num_paused_requests": 0}

    @app.post("/wake_up")
    async def wake_up(request: Request) -> dict[str, Any]:
        """Loads a model as a request would."""
        await loaded(pool.wake_up(models.name_for(request.query_params.get("model"))))
        return {"success": True, "is_sleeping": False}

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Says whether none of the models is loaded."""
        return {"is_sleeping": all(pool.slots[name].state != "loaded" for name in chosen(request))}


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


def _add_middleware(app: FastAPI, config: ModelsConfig, models: Models) -> None:
    """Adds the middleware, outermost last; what it judges, the models' own servers need not."""
    gateway = config.shared.gateway
    app.add_middleware(HeadMiddleware)
    keys = ApiKeys(gateway.api_key, gateway.api_key_file)
    if keys.required:
        app.add_middleware(
            KeyMiddleware, keys=keys, is_open=is_open, defaults=KeyLimits(), metrics=models.metrics
        )
    add_web_middleware(app, gateway, keys)

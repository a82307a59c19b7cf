"""The routes of the HTTP server."""

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import grpc
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specpool.openai.coordinators import Coordinators, Metadata
from specpool.openai.errors import ApiError, api_error, unavailable, unknown_model
from specpool.openai.generation import CHAT, COMPLETION, Generation, Kind
from specpool.openai.metrics import Metrics, Observed
from specpool.openai.reading import check_type, is_short, metadata_of, parse, read_body
from specpool.openai.reply import Reply, while_connected
from specpool.openai.settings import OpenAISettings
from specpool.openai.streams import DONE, event
from specpool.rpc.observability.line_limits import without_message
from specpool.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Request, Reply, Observed], Awaitable[None]]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """An ASGI application that counts requests and answers errors in OpenAI's form."""

    def __init__(self, route: str, handle: Handler, metrics: Metrics) -> None:
        self._route, self._handle, self._metrics = route, handle, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._metrics.request(self._route) as observed:
            reply = Reply(send, observed)
            try:
                await self._handle(Request(scope, receive), reply, observed)
            except ClientDisconnect:
                return
            except ApiError as error:
                refused = error
            except asyncio.CancelledError:  # the drain is over
                refused = unavailable("the server is shutting down")
            except Exception as error:
                incident = uuid.uuid4().hex[:8]
                log.error("internal error %s", incident, exc_info=without_message(error))
                message = f"internal error {incident}; the server's log has the details"
                refused = ApiError(500, message, "server_error")
            else:
                return
            if reply.has_begun:
                await reply.end(event(refused.body().decode()) + DONE)
            else:
                await reply.json(refused.body(), refused.status, refused.all_headers())


class Handlers:
    """The handlers of all routes."""

    def __init__(self, settings: OpenAISettings, coordinators: Coordinators) -> None:
        self._settings, self._coordinators = settings, coordinators
        self.metrics = Metrics()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        generating = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
        routes = [self._route(path, partial(self._generate, path, kind), "POST") for path, kind in generating.items()]
        routes.append(self._route("/v1/models", self._models))
        routes.append(self._route("/v1/models/{model:path}", self._models))
        routes.append(self._route("/health", self._health))
        routes.append(Route("/metrics", self._metrics, methods=["GET"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
        app.router.redirect_slashes = False
        return app

    def _route(self, path: str, handle: Handler, method: str = "GET") -> Route:
        return Route(path, Endpoint(path, handle, self.metrics), methods=[method])

    async def _generate(self, path: str, kind: Kind, request: Request, reply: Reply, observed: Observed) -> None:
        metadata = metadata_of(request)
        check_type(request)
        if not is_short(request):
            await self._info(metadata)  # authenticate the caller before reading a large body
        body = parse(kind.body, await read_body(request, self._settings.max_body_bytes, self._settings.receive_seconds))
        on_first = partial(self.metrics.first_token, path, observed)
        generation = Generation(kind, body, metadata, reply, on_first)
        await while_connected(request.receive, generation.run(self._coordinators))

    async def _models(self, request: Request, reply: Reply, _: Observed) -> None:
        info = await self._info(metadata_of(request))
        model = {"id": info.served_model_name, "object": "model", "created": 0, "owned_by": "specpool"}
        model["max_model_len"] = info.max_model_len
        asked = request.path_params.get("model")
        if asked is not None and asked != info.served_model_name:
            raise unknown_model(asked, info.served_model_name)
        answer = model if asked is not None else {"object": "list", "data": [model]}
        await reply.json(json.dumps(answer, ensure_ascii=False).encode())

    async def _info(self, metadata: Metadata) -> pb.GetModelInfoResponse:
        """Ask a coordinator for the model info, for which it authenticates the caller. Raises ApiError."""
        try:
            return await self._coordinators.call(b"", lambda link: link.info(metadata, is_cached=False))
        except grpc.RpcError as error:
            raise api_error(error) from None

    async def _health(self, request: Request, reply: Reply, _: Observed) -> None:
        is_serving = self._coordinators.is_serving
        status = {"status": "ok" if is_serving else "no coordinator is serving"}
        await reply.json(json.dumps(status).encode(), 200 if is_serving else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=METRICS_TYPE)


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Answer requests for unknown routes and with wrong methods."""
    assert isinstance(error, HTTPException)
    reason = f"{request.method} is not allowed for" if error.status_code == 405 else "there is no"
    refused = ApiError(error.status_code, f"{reason} {request.url.path[:200]}", code="unknown_route")
    headers = {**(error.headers or {})}
    return Response(refused.body(), error.status_code, headers, media_type="application/json")

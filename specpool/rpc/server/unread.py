"""Ending a stream that its client does not read: its handler waits for a message to be sent, and cannot end it."""

import asyncio
import logging
from contextvars import copy_context
from typing import Any

import grpc

from specpool.protocol.errors import ServiceError
from specpool.rpc.errors import ANSWERED, status_of

log = logging.getLogger(__name__)

_ENDING: dict[int, asyncio.Task[None]] = {}
"""The tasks that end streams, by the identity of the call."""


class UnreadStream:
    """The call of the handler that creates this object; `end` may be called from anywhere in its event loop."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._handler = asyncio.current_task()
        self._variables = copy_context()

    def end(self, error: ServiceError) -> None:
        """Cancels the handler. The client gets the status of the error once it has read what was sent before."""
        self._variables.run(log.info, "a stream of %s is ended: %s", self._context.peer(), error)
        call = id(self._context)
        _ENDING[call] = ending = asyncio.create_task(self._send_status(error))
        ending.add_done_callback(lambda _: _ENDING.pop(call, None))
        if self._handler is not None:  # only after the status is on its way: a cancelled call sends none
            asyncio.get_running_loop().call_soon(self._handler.cancel)

    async def _send_status(self, error: ServiceError) -> None:
        code, text, metadata = status_of(error)
        try:
            await self._context.abort(code, text, (*metadata, ANSWERED))
        except grpc.aio.AbortError:
            pass  # sent
        except Exception as failure:  # the client has left, or the server stops
            log.debug("the status of an unread stream was not sent: %s", failure)


async def status_sent(context: Any) -> None:
    """Waits until the status of a call that was ended is sent, which may be as long as the client keeps the connection;
    returns at once for other calls."""
    if (ending := _ENDING.get(id(context))) is not None:
        await asyncio.wait([ending])

"""Ends streams whose clients do not read. Their handlers block in a send and cannot end the call themselves."""

import asyncio
import logging
from contextvars import copy_context
from typing import Any

import grpc

from specpool.protocol.errors import ServiceError
from specpool.rpc.status import ANSWERED, status_of

log = logging.getLogger(__name__)

_ENDING: dict[int, asyncio.Task[None]] = {}
"""Tasks that send a final status, by the identity of the call."""


class UnreadStream:
    """The stream of the handler that creates this object. `end` may be called from any task of the event loop."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._handler = asyncio.current_task()
        self._variables = copy_context()

    def end(self, error: ServiceError) -> None:
        """Cancel the handler. The client gets the error's status once it reads what was already sent."""
        self._variables.run(log.info, "ending a stream of %s: %s", self._context.peer(), error)
        call = id(self._context)
        _ENDING[call] = ending = asyncio.create_task(self._send_status(error))
        ending.add_done_callback(lambda _: _ENDING.pop(call, None))
        if self._handler is not None:  # after the status is on its way: a cancelled call sends none
            asyncio.get_running_loop().call_soon(self._handler.cancel)

    async def _send_status(self, error: ServiceError) -> None:
        code, text, metadata = status_of(error)
        try:
            await self._context.abort(code, text, (*metadata, ANSWERED))
        except grpc.aio.AbortError:
            pass  # sent
        except Exception as failure:  # not even the first message is read, client disconnected, or server stopping
            log.debug("could not send the status of an unread stream: %s", failure)


async def status_sent(context: Any) -> None:
    """Wait until the status of an ended stream is sent, at most until the client disconnects.

    Return at once for other calls.
    """
    if (ending := _ENDING.get(id(context))) is not None:
        await asyncio.wait([ending])

"""`specpool up`: coordinator, draft and target workers and perhaps a standby on this machine, one process each."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specpool.cli.preflight import check_services
from specpool.cli.processes import ProcessFailedError, Service, kill, require_torch
from specpool.cli.services import models_of, services_of
from specpool.cli.up_settings import SecureUpSettings, UpSettings
from specpool.rpc.observability.logs import configure_logging

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@asynccontextmanager
async def running(settings: UpSettings) -> AsyncIterator[str]:
    """Run all processes and yield the coordinator's address once all are serving. ProcessFailedError.

    Stop signals cancel the calling task, which ends all processes.
    """
    services: list[Service] = []
    watchers: list[asyncio.Task[None]] = []
    stop_signals = _cancel_on_signals()
    try:
        services += services_of(settings, *models_of(settings))
        await asyncio.to_thread(check_services, services)
        first = [service for service in services if not service.starts_last]
        last = [service for service in services if service.starts_last]
        try:
            for group in (first, last):
                for service in reversed(group):  # the coordinator first: it shows clients how far the workers are
                    await service.start()
                await asyncio.gather(*(service.wait_serving() for service in group))
        except ProcessFailedError:
            await kill([service.process for service in services if service.process is not None])
            raise
        watchers = [asyncio.create_task(service.keep_running()) for service in services]
        yield services[-1].address
    finally:
        for watcher in watchers:
            watcher.cancel()
        try:
            # Stop the coordinator first: it needs the workers to drain.
            for service in reversed(services):
                await service.stop(settings.drain_seconds)
        finally:  # a second signal skips to here
            await kill([service.process for service in services if service.process is not None])
            await asyncio.gather(*watchers, return_exceptions=True)
            for number in stop_signals:
                asyncio.get_running_loop().remove_signal_handler(number)


def up(settings: SecureUpSettings) -> int:
    """Run the command until SIGTERM or Ctrl-C; return its exit status."""
    configure_logging(settings.log_level, settings.log_format, "up")
    try:
        require_torch()
        asyncio.run(_serve(settings))
    except ProcessFailedError as error:
        print(f"specpool up: {error}", file=sys.stderr)
        return error.status
    except asyncio.CancelledError:  # by a stop signal
        return 0
    return 0


async def _serve(settings: SecureUpSettings) -> None:
    async with running(settings) as address:
        print(f"specpool is serving at {address}", flush=True)
        await asyncio.Event().wait()


def _cancel_on_signals() -> list[signal.Signals]:
    """Make stop signals cancel the calling task, except SIGHUP under `nohup`; return these signals."""
    caller = asyncio.current_task()
    assert caller is not None
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    numbers = [number for number in STOP_SIGNALS if number not in ignored]
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, caller.cancel)
    return numbers

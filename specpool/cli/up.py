"""`specpool up`: HTTP server, coordinator, target and draft workers, perhaps a canary and a standby, one process each.

On a GPU, target workers carry the draft by default, and no draft workers start.
"""

import asyncio
import math
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import chain, count
from typing import Any

from coordinator.config.settings import MAX_NUM_SEQS
from specpool.cli.preflight import check_services, health_check_security, own_names
from specpool.cli.processes import ProcessFailedError, Service, arguments_of, kill, require_torch
from specpool.cli.up_http import api_url, http_services
from specpool.cli.up_security import SecureUpSettings
from specpool.cli.up_settings import CANARY, COORDINATOR, CPU, CURRENT, ENGINE, UpSettings
from specpool.engine.config.device_names import may_be_gpu
from specpool.engine.config.options import MTP
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpool.engine.models.embedded_pair import NAME as EMBEDDED_NAME
from specpool.rpc.config.settings import ListeningSettings
from specpool.rpc.observability.logs import configure_logging
from specpool.rpc.observability.tracing import TraceSettings
from specpool.rpc.ports import free_port
from specpool.rpc.security.channel import join_address
from specpool.rpc.security.settings import ServerSecurity

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
OF_CARRIED = ("draft_revision", "draft_activations", "draft_kv_memory")
"""Settings of the carried draft, which target workers take under the same names."""
LIKE = {"standby": "target", CANARY: "draft"}
"""Roles that share the settings of another role."""
UNNUMBERED = {"target worker", "draft worker"}
"""Workers that log under the default name of their process."""
PER_PROCESS = {"config", "host", "port", "metrics_port"}
"""Settings with a separate value for each process."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def models_of(settings: UpSettings) -> tuple[str, str | None]:
    """Return target and draft. The workers create the embedded pair on first use."""
    draft = None if settings.draft == "none" else settings.draft
    if settings.target is not None:
        return settings.target, draft
    return EMBEDDED_TARGET, EMBEDDED_DRAFT if settings.draft is None else draft


def services_of(settings: UpSettings, target: str, draft: str | None) -> list[Service]:
    """Return the processes for these models, in starting order."""
    given = {"target": target, "draft": draft, CANARY: settings.draft_canary}
    given["standby"] = target if settings.standby else None
    models = {role: model for role, model in given.items() if model is not None}
    roles = models.keys() - ({"draft"} if settings.is_colocated else set())
    numbers = {role: _numbers(settings, role) for role in models if role in roles}
    ports = count(free_port(sum(map(len, numbers.values()))))
    workers = {
        role: [_worker(role, number, models, next(ports), settings) for number in each]
        for role, each in numbers.items()
    }
    port = settings.port or free_port()
    flags = _common(settings, COORDINATOR) | {
        "host": settings.host,
        "port": port,
        "max_batch_size": settings.max_batch_size or settings.max_num_seqs,
        "metrics_port": settings.metrics_port,
        "worker_tls": False,
        "served_model_name": settings.served_model_name or (EMBEDDED_NAME if settings.target is None else None),
        **_addresses(workers),
    }
    security = settings if isinstance(settings, ServerSecurity) else ServerSecurity()
    address = join_address(LOOPBACK.get(settings.host, settings.host), port)
    connection = health_check_security(security)
    coordinator = Service("coordinator", "coordinator.server", arguments_of(flags), address, connection, flags)
    return [*chain.from_iterable(workers.values()), coordinator]


def _addresses(workers: Mapping[str, list[Service]]) -> dict[str, str]:
    """Return the coordinator's address settings. With a canary, the draft workers are named after their drafts."""
    addresses = {role: [worker.address for worker in each] for role, each in workers.items()}
    if (canary := addresses.pop(CANARY, None)) is not None:
        named = {CURRENT: addresses["draft"], CANARY: canary}
        addresses["draft"] = [f"{name}={address}" for name, each in named.items() for address in each]
    names = {"standby": "target_standby"}
    return {f"{names.get(role, role)}_address": ",".join(each) for role, each in addresses.items()}


def _count(settings: UpSettings, role: str) -> int:
    return int(getattr(settings, f"{role}s", 1))


def _numbers(settings: UpSettings, role: str) -> range:
    """Return the numbers of a role's workers. The canary's number follows those of the other draft workers."""
    first = settings.drafts + 1 if role == CANARY else 1
    return range(first, first + _count(settings, role))


def _slots(settings: UpSettings, role: str) -> int:
    """Return the sequences of a worker: max_num_seqs, or a draft's share of the sequences of more targets."""
    workers = {"draft": settings.drafts, CANARY: 1}.get(role, settings.targets)
    share = max(1, settings.targets / workers)
    return min(MAX_NUM_SEQS, math.ceil(share * settings.max_num_seqs))


def _worker(role: str, number: int, models: Mapping[str, str], port: int, settings: UpSettings) -> Service:
    """Return the worker with this number, from 1."""
    like = LIKE.get(role, role)
    own = {name: getattr(settings, of_up, None) for name, of_up in own_names(like).items()}
    if role == CANARY:
        own["revision"] = None
    server = {**ListeningSettings.model_fields, **TraceSettings.model_fields}
    flags = _common(settings, ENGINE | server) | own
    workers = settings.draft_workers if like == "draft" else _count(settings, role)
    flags |= _device(getattr(settings, f"{like}_device"), number, workers, settings.threads)
    flags |= {"model": models[role], "port": port, "max_sequences": _slots(settings, role)}
    if like == "draft" and models[role] == MTP:
        flags |= {"revision": settings.target_revision, "target_model": models["target"]}
    elif like == "draft" and settings.target_revision is None:
        flags["target_model"] = models["target"]
    flags["startup_cache"] = None if settings.startup_cache else False
    if settings.metrics_port is not None:
        flags["metrics_port"] = settings.metrics_port + settings.metrics_offset(role, number)
    if like == "target":
        flags |= _devices(settings, (settings.standby_devices if role == "standby" else ()) or settings.target_devices)
        if settings.is_colocated:
            flags |= {"draft": models["draft"], **{name: getattr(settings, name) for name in OF_CARRIED}}
    name = f"{role} worker" + f" {number}" * (_count(settings, role) > 1)
    if name not in UNNUMBERED:
        flags["log_name"] = name.replace(" ", "-")
    starts_last = role == "standby" or number > 1
    module, address = f"{like}_worker.server", f"127.0.0.1:{port}"
    named = {"device": f"{like}_device", **own_names(like)}
    typed = {f"--{name}".replace("_", "-"): f"--{of_up}".replace("_", "-") for name, of_up in named.items()}
    typed |= {"--max-sequences": "--max-num-seqs", "--tensor-parallel": "--target-devices"}
    return Service(name, module, arguments_of(flags), address, settings=flags, flags=typed, starts_last=starts_last)


def _device(devices: tuple[str, ...], number: int, workers: int, threads: int) -> dict[str, Any]:
    """Return the device of a worker, and its threads: workers on the CPU divide the cores."""
    turns = [devices[index % len(devices)] for index in range(workers)]
    device, sharing = turns[number - 1], 1
    if workers > 1 and not may_be_gpu(device):
        sharing = sum(not may_be_gpu(each) for each in turns)
    return {"device": device, "threads": max(1, threads // sharing)}


def _devices(settings: UpSettings, devices: tuple[str, ...]) -> dict[str, Any]:
    """Return the flags of a target on these devices. None are needed for the device of `target_device`."""
    flags: dict[str, Any] = {"device": ",".join(devices)} if devices else {}
    if len(devices) > 1:
        flags["tensor_parallel"] = len(devices)
    if CPU in devices:  # ranks divide the cores
        flags["threads"] = max(1, settings.threads // len(devices))
    return flags


def _common(settings: UpSettings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that share a name with these fields."""
    names = type(settings).model_fields.keys() & fields.keys() - PER_PROCESS
    return {name: getattr(settings, name) for name in sorted(names)}


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
        coordinator = services[-1]
        await asyncio.to_thread(check_services, services)
        services += http_services(settings, coordinator)
        first = [service for service in services if not service.starts_last]
        last = [service for service in services if service.starts_last]
        try:
            for group in (first, last):
                for service in reversed(group):  # servers first: they show clients how far the workers are
                    await service.start()
                await asyncio.gather(*(service.wait_serving() for service in group))
        except ProcessFailedError:
            await kill([service.process for service in services if service.process is not None])
            raise
        watchers = [asyncio.create_task(service.keep_running()) for service in services]
        yield coordinator.address
    finally:
        for watcher in watchers:
            watcher.cancel()
        try:
            # Servers first: they need the coordinator and the workers to drain.
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
        if (url := api_url(settings, address)) is not None:
            print(f"OpenAI's API is at {url}", flush=True)
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

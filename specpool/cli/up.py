"""`specpool up`: coordinator, draft worker and target worker on this machine, as three processes."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from coordinator.config.settings import MAX_SPECULATIVE_TOKENS, CoordinatorSettings, PolicyName
from coordinator.scheduling.sequence import DraftMethod
from specpool.cli.preflight import check_services
from specpool.cli.processes import (
    ProcessFailedError,
    Service,
    arguments_of,
    free_port,
    kill,
    require_torch,
)
from specpool.cli.tls_check import health_check_security
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpool.engine.models.embedded_pair import NAME as EMBEDDED_NAME
from specpool.environment.cpus import usable_cpus
from specpool.rpc.config.settings import ListeningSettings
from specpool.rpc.observability.logs import configure_logging
from specpool.rpc.observability.trace_settings import TraceSettings
from specpool.rpc.security.channel import join_address
from specpool.rpc.security.settings import Names, ServerSecurity
from specpool.worker.settings import WorkerSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
METRICS_PORTS = 3
"""One per process, consecutive."""
CPU = "cpu"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
PER_PROCESS = {"config", "host", "port", "metrics_port"}
"""Settings with a separate value for each process."""

# Reuse the field definitions of the processes.
ENGINE: dict[str, Any] = EngineOptions.model_fields
COORDINATOR: dict[str, Any] = CoordinatorSettings.model_fields
WORKER: dict[str, Any] = WorkerSettings.model_fields


class UpSettings(ListeningSettings):
    """Serve a pair on this machine: coordinator, draft worker and target worker. Default: the embedded pair."""

    port: int = COORDINATOR["port"]
    target: str | None = Field(
        None, min_length=1, description="target: hub id, folder or GGUF file; default: the embedded pair's"
    )
    draft: str | None = Field(
        None,
        min_length=1,
        description='draft: hub id, folder or GGUF file; "none": prompt lookup only; default: the embedded pair\'s '
        "if the target is",
    )
    target_revision: str | None = ENGINE["revision"]
    draft_revision: str | None = ENGINE["revision"]
    target_device: str = ENGINE["device"]
    target_devices: Names = Field(
        (), description="shard the target over these devices, such as cuda:0,cuda:1; instead of target_device"
    )
    target_weights: Literal["auto", "float32"] = ENGINE["weights"]
    draft_device: str = Field("auto", description="device of the draft; with two GPUs: cuda:1")
    threads: int = Field(
        default_factory=usable_cpus,
        ge=1,
        le=1024,
        description="CPU threads of each worker, shared by the ranks of a CPU target; default: all available",
    )
    served_model_name: str | None = COORDINATOR["served_model_name"]
    max_num_seqs: int = COORDINATOR["max_num_seqs"]
    max_batch_size: Annotated[int | None, COORDINATOR["max_batch_size"]] = Field(
        None, description="sequences in one round; default: all"
    )
    policy: PolicyName = COORDINATOR["policy"]
    prefix_caching: bool = COORDINATOR["prefix_caching"]
    kv_layout: Literal["slots", "padded"] = ENGINE["kv_layout"]
    max_model_len: int | None = ENGINE["max_model_len"]
    num_speculative_tokens: Annotated[int | None, Field(le=MAX_SPECULATIVE_TOKENS)] = COORDINATOR[
        "num_speculative_tokens"
    ]
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65536 - METRICS_PORTS,
        description="Prometheus port of the coordinator; the next two are the target and the draft worker's; "
        "default: none",
    )
    startup_cache: bool = WORKER["startup_cache"]
    draft_method: DraftMethod = COORDINATOR["draft_method"]
    smg: bool = COORDINATOR["smg"]
    chat_template: Path | None = COORDINATOR["chat_template"]

    @field_validator("target_devices")
    @classmethod
    def _check_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if len(devices) > 1 and set(devices) != {CPU}:
            for device in devices:
                if re.fullmatch(r"cuda:(0|[1-9]\d*)", device) is None:
                    raise ValueError(f'"{device}" cannot be one of several devices: use "cuda:N" for all, or "cpu"')
                if devices.count(device) > 1:
                    raise ValueError(f"duplicate device {device}")
        return devices

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.target_devices and "target_device" in self.model_fields_set:
            raise ValueError("give target_device or target_devices, not both")
        if self.metrics_port is not None and 0 <= self.port - self.metrics_port < METRICS_PORTS:
            raise ValueError(f"port must not be metrics_port or one of the {METRICS_PORTS - 1} after it")
        for role, model in (("target", self.target), ("draft", self.draft)):
            if getattr(self, f"{role}_revision") is not None and model in (None, "none"):
                raise ValueError(f"{role}_revision needs a {role} from the hub")
        return self


class SecureUpSettings(UpSettings, ServerSecurity, TraceSettings):
    __doc__ = UpSettings.__doc__


@asynccontextmanager
async def running(settings: UpSettings) -> AsyncIterator[str]:
    """Run all processes and yield the coordinator's address once all are serving. ProcessFailedError.

    Stop signals cancel the calling task, which ends all processes.
    """
    services: list[Service] = []
    watchers: list[asyncio.Task[None]] = []
    stop_signals = _cancel_on_signals()
    try:
        services += services_of(settings, *_models(settings))
        await asyncio.to_thread(check_services, services)
        for service in reversed(services):  # the coordinator first: it shows clients how far the workers are
            await service.start()
        try:
            await asyncio.gather(*(service.wait_serving() for service in services))
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
            for number in stop_signals:
                asyncio.get_running_loop().remove_signal_handler(number)


def up(settings: SecureUpSettings) -> int:
    """Run the command until SIGTERM or Ctrl-C; return its exit status."""
    configure_logging(settings.log_level, settings.log_format, "up", follow_native=False)
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


def _models(settings: UpSettings) -> tuple[str, str | None]:
    """Target and draft. The workers create the embedded pair on first use."""
    draft = None if settings.draft == "none" else settings.draft
    if settings.target is not None:
        return settings.target, draft
    return EMBEDDED_TARGET, EMBEDDED_DRAFT if settings.draft is None else draft


def services_of(settings: UpSettings, target: str, draft: str | None) -> list[Service]:
    """The processes for these models, in the order in which they start."""
    models = {"target": target} | ({"draft": draft} if draft is not None else {})
    workers = {role: _worker(role, model, settings) for role, model in models.items()}
    port = settings.port or free_port()
    flags = _common(settings, COORDINATOR) | {
        "host": settings.host,
        "port": port,
        "max_batch_size": settings.max_batch_size or settings.max_num_seqs,
        "metrics_port": settings.metrics_port,
        "worker_tls": False,
        "served_model_name": settings.served_model_name or (EMBEDDED_NAME if settings.target is None else None),
        **{f"{role}_address": worker.address for role, worker in workers.items()},
    }
    security = settings if isinstance(settings, ServerSecurity) else ServerSecurity()
    address = join_address(LOOPBACK.get(settings.host, settings.host), port)
    connection = health_check_security(security)
    coordinator = Service("coordinator", "coordinator.server", arguments_of(flags), address, connection, flags)
    return [*workers.values(), coordinator]


def _worker(role: str, model: str, settings: UpSettings) -> Service:
    port, devices = free_port(), settings.target_devices if role == "target" else ()
    ranks = len(devices)
    own = {name: getattr(settings, f"{role}_{name}", None) for name in ("revision", "weights", "device")}
    server = {**ListeningSettings.model_fields, **TraceSettings.model_fields}
    flags = _common(settings, ENGINE | server) | own
    flags |= {"model": model, "port": port, "max_sequences": settings.max_num_seqs}
    flags["startup_cache"] = None if settings.startup_cache else False
    if settings.metrics_port is not None:
        flags["metrics_port"] = settings.metrics_port + (1 if role == "target" else 2)
    if devices:
        flags["device"] = ",".join(devices)
        flags["tensor_parallel"] = ranks if ranks > 1 else None
        if CPU in devices:  # ranks divide the cores
            flags["threads"] = max(1, settings.threads // ranks)
    module, address = f"{role}_worker.server", f"127.0.0.1:{port}"
    return Service(f"{role} worker", module, arguments_of(flags), address, settings=flags)


def _common(settings: UpSettings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the settings that share a name with these fields."""
    names = type(settings).model_fields.keys() & fields.keys() - PER_PROCESS
    return {name: getattr(settings, name) for name in sorted(names)}

"""`specpool up`: coordinator, draft worker and target worker on this machine, as three processes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from coordinator.config.settings import MAX_NUM_SEQS, MAX_SPECULATIVE_TOKENS, PolicyName, ServesSmg
from coordinator.scheduling.sequence import DraftMethod
from specpool.cli.own_tls import coordinator_flags, own_security
from specpool.cli.processes import (
    KILL_AFTER_SECONDS,
    ProcessFailedError,
    Service,
    end,
    kill,
    require_torch,
    start_module,
)
from specpool.engine.models.embedded_pair import existing_pair
from specpool.rpc.config.settings import UINT32_MAX, ListeningSettings
from specpool.rpc.observability.trace_settings import TraceSettings
from specpool.rpc.security.channel import join_address
from specpool.rpc.security.settings import Names, ServerSecurity

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
METRICS_PORTS = 3
"""One for each process, from the setting on."""
CPU = "cpu"
REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class UpSettings(ListeningSettings):
    """Runs coordinator, draft worker and target worker on this machine. Without models: the embedded pair."""

    port: int = Field(50050, ge=0, le=65535, description="port of the coordinator; 0 lets the system choose")
    target: str | None = Field(
        None, description="target model: hub id, folder or GGUF file; default: the embedded pair's"
    )
    draft: str | None = Field(
        None, description='draft model; "none": plain decoding; default: the embedded pair\'s, with its target only'
    )
    target_revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a target from the hub; default: its main branch"
    )
    draft_revision: str | None = Field(None, min_length=1, description="the same for the draft")
    target_device: str = Field("auto", description="device of the target")
    target_devices: Names = Field(
        (),
        description="devices among which the target is divided (tensor parallelism), such as cuda:0,cuda:1; instead of "
        "target_device",
    )
    target_weights: Literal["auto", "float32"] = Field(
        "auto", description='"float32": quantized weights of the target are unpacked, as --weights of its worker says'
    )
    draft_device: str = Field("auto", description="device of the draft; with two GPUs name cuda:1")
    threads: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
        le=1024,
        description="CPU threads of each worker, divided among the ranks of a target on the CPU; default: all that may "
        "be used",
    )
    max_num_seqs: int = Field(
        16,
        ge=1,
        le=MAX_NUM_SEQS,
        validation_alias=AliasChoices("max_num_seqs", "window_size"),
        description="sequences generated at a time",
    )
    max_batch_size: int | None = Field(None, ge=1, le=MAX_NUM_SEQS, description="sequences in a round; default: all")
    policy: PolicyName = Field("ragged", description="how sequences are grouped into rounds: ragged, exspec or eqspec")
    prefix_caching: bool = Field(
        True,
        validation_alias=AliasChoices("prefix_caching", "prefix_reuse"),
        description="copy the cache of earlier requests that begin the same",
    )
    kv_layout: Literal["slots", "padded"] = Field("slots", description="layout of both workers' KV caches")
    max_model_len: int = Field(2048, ge=16, le=UINT32_MAX, description="positions a sequence can have")
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
        description="draft tokens per round unless a request says otherwise; default: as many as save time",
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65536 - METRICS_PORTS,
        description="port on which the coordinator serves metrics to Prometheus; the next one is the target worker's, "
        "and the one after that the draft worker's; default: none",
    )
    startup_cache: bool = Field(True, description="let workers on a CPU reuse what earlier starts proved and measured")
    draft_method: DraftMethod = Field(
        DraftMethod.BEST, description="draft method: model, ngram (prompt lookup), or best: whichever promises more"
    )
    smg: ServesSmg = Field(
        False, description="let the coordinator also serve the gateway smg, which speaks HTTP to clients"
    )

    @field_validator("target_devices")
    @classmethod
    def _devices_differ(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if len(devices) > 1 and set(devices) != {CPU}:
            for device in devices:
                if re.fullmatch(r"cuda:(0|[1-9]\d*)", device) is None:
                    raise ValueError(f'"{device}" cannot be one of several devices: all must be "cuda:N", or all "cpu"')
                if devices.count(device) > 1:
                    raise ValueError(f"{device} is named twice")
        return devices

    @model_validator(mode="after")
    def _one_way_to_name_devices(self) -> Self:
        if self.target_devices and "target_device" in self.model_fields_set:
            raise ValueError("give target_device or target_devices, not both")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.metrics_port is not None and 0 <= self.port - self.metrics_port < METRICS_PORTS:
            raise ValueError(f"port must not be metrics_port or one of the {METRICS_PORTS - 1} after it")
        return self

    @model_validator(mode="after")
    def _revisions_have_models(self) -> Self:
        for kind, model in (("target", self.target), ("draft", self.draft)):
            if getattr(self, f"{kind}_revision") is not None and model in (None, "none"):
                raise ValueError(f"{kind}_revision needs a {kind} from the hub")
        return self


class SecureUpSettings(UpSettings, ServerSecurity, TraceSettings):
    __doc__ = UpSettings.__doc__


@asynccontextmanager
async def running(settings: UpSettings) -> AsyncIterator[str]:
    """Runs all processes; yields the coordinator's address once all serve. ProcessFailedError.

    Signals that ask us to stop cancel the calling task, so that no process is left behind.
    """
    services: list[Service] = []
    watchers: list[asyncio.Task[None]] = []
    stop_signals = _cancel_on_signals()
    try:
        services += services_of(settings, *await _models(settings))
        for service in services:
            await service.start()
        await asyncio.gather(*(service.wait_serving() for service in services))
        watchers = [asyncio.create_task(service.keep_running()) for service in services]
        yield services[-1].address
    finally:
        for watcher in watchers:
            watcher.cancel()
        try:
            # The coordinator first: it drains with the help of the workers.
            for service in reversed(services):
                await service.stop(settings.drain_seconds)
        finally:  # a second signal comes here at once
            await kill([service.process for service in services if service.process is not None])
            for number in stop_signals:
                asyncio.get_running_loop().remove_signal_handler(number)


def up(settings: SecureUpSettings) -> int:
    """Runs the command until SIGTERM or Ctrl-C; returns its exit status."""
    try:
        require_torch()
        asyncio.run(_serve(settings))
    except ProcessFailedError as error:
        print(f"specpool up: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:  # by a stop signal
        return 0
    return 0


async def _serve(settings: SecureUpSettings) -> None:
    async with running(settings) as address:
        print(f"specpool is serving at {address}", flush=True)
        await asyncio.Event().wait()


def _cancel_on_signals() -> list[signal.Signals]:
    """Lets stop signals cancel the calling task; returns those signals. Under `nohup`, SIGHUP is none of them."""
    caller = asyncio.current_task()
    assert caller is not None
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    numbers = [number for number in STOP_SIGNALS if number not in ignored]
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, caller.cancel)
    return numbers


async def _models(settings: UpSettings) -> tuple[str, str | None]:
    """Target and draft to run; the embedded pair, made if need be, where the settings name none."""
    draft = None if settings.draft == "none" else settings.draft
    if settings.target is not None:
        return settings.target, draft
    if (made := existing_pair()) is not None:
        return str(made.target), str(made.draft) if settings.draft is None else draft
    # In a process of its own, because making the pair needs torch and this process does not.
    making = await start_module("specpool.engine.models.embedded_pair", stdout=asyncio.subprocess.PIPE)
    try:
        printed, _ = await making.communicate()
    finally:
        await end(making, KILL_AFTER_SECONDS)
    if making.returncode != 0:
        raise ProcessFailedError("the embedded pair could not be made")
    pair = json.loads(printed)
    return pair["target"], pair["draft"] if settings.draft is None else draft


def services_of(settings: UpSettings, target: str, draft: str | None) -> list[Service]:
    """The processes for these models, in the order in which they start."""
    shared = ["--max-model-len", str(settings.max_model_len), "--max-sequences", str(settings.max_num_seqs)]
    shared += ["--kv-layout", settings.kv_layout, *_server_flags(settings)]
    shared += [] if settings.startup_cache else ["--no-startup-cache"]
    workers = [_worker("target", target, settings, [*shared, *_metrics_flags(settings, 1)])]
    if draft is not None:
        workers.append(_worker("draft", draft, settings, [*shared, *_metrics_flags(settings, 2)]))
    port = settings.port or free_port()
    arguments = ["--host", settings.host, "--port", str(port), "--max-num-seqs", str(settings.max_num_seqs)]
    arguments += ["--policy", settings.policy, *_server_flags(settings), *_metrics_flags(settings, 0)]
    arguments += ["--max-batch-size", str(settings.max_batch_size or settings.max_num_seqs)]
    if settings.num_speculative_tokens is not None:
        arguments += ["--num-speculative-tokens", str(settings.num_speculative_tokens)]
    arguments += ["--draft-method", settings.draft_method]
    arguments += ["--prefix-caching" if settings.prefix_caching else "--no-prefix-caching"]
    arguments += ["--smg"] if settings.smg else []
    for worker in workers:
        arguments += [f"--{worker.name.split()[0]}-address", worker.address]
    security = settings if isinstance(settings, ServerSecurity) else ServerSecurity()
    arguments += coordinator_flags(security)
    address = join_address(REACHABLE.get(settings.host, settings.host), port)
    return [*workers, Service("coordinator", "coordinator.server", arguments, address, own_security(security))]


def _worker(kind: str, model: str, settings: UpSettings, shared: list[str]) -> Service:
    port = free_port()
    arguments = ["--model", model, *_device_flags(kind, settings), "--port", str(port), *shared]
    revision = getattr(settings, f"{kind}_revision")
    arguments += ["--revision", revision] if revision is not None else []
    unpacked = kind == "target" and settings.target_weights != "auto"
    arguments += ["--weights", settings.target_weights] if unpacked else []
    return Service(f"{kind} worker", f"{kind}_worker.server", arguments, f"127.0.0.1:{port}")


def _device_flags(kind: str, settings: UpSettings) -> list[str]:
    """Flags of a worker's devices and threads, which each rank has for itself: ranks on the CPU divide its cores."""
    devices = settings.target_devices if kind == "target" else ()
    ranks = len(devices)
    threads = max(1, settings.threads // ranks) if CPU in devices else settings.threads
    flags = ["--device", ",".join(devices) or getattr(settings, f"{kind}_device"), "--threads", str(threads)]
    return [*flags, "--tensor-parallel", str(ranks)] if ranks > 1 else flags


def _server_flags(settings: UpSettings) -> list[str]:
    flags = ["--drain-seconds", str(settings.drain_seconds)]
    flags += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    if isinstance(settings, TraceSettings) and settings.otlp_traces_endpoint is not None:
        flags += ["--otlp-traces-endpoint", settings.otlp_traces_endpoint]
        flags += ["--trace-sample-rate", str(settings.trace_sample_rate)]
    return flags


def _metrics_flags(settings: UpSettings, process: int) -> list[str]:
    return [] if settings.metrics_port is None else ["--metrics-port", str(settings.metrics_port + process)]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

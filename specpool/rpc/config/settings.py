"""Configuration of a process from flags, `SPECPOOL_*` environment variables and a TOML file, in order of precedence.

Every setting works in all three places. Unknown settings are errors.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, ByteSize, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specpool.environment.process import package_version
from specpool.rpc.config.help import names_of_settings, show_options
from specpool.rpc.config.inputs import (
    ENV_PREFIX,
    check_utf8,
    check_variables,
    config_file_of,
    explain,
    read_config_file,
    suggest,
)
from specpool.rpc.observability.logs import LogFormat, end_process
from specpool.rpc.observability.tracing import TraceSettings
from specpool.rpc.security.channel import (
    COORDINATOR_PORT,
    DRAFT_WORKER_PORT,
    TARGET_WORKER_PORT,
    check_address,
    check_addresses,
    check_named_addresses,
)
from specpool.rpc.security.settings import ServerSecurity

# Means "no value" on a command line. It cannot be typed, since any word may be a real value.
NO_VALUE = "\0"

UINT32_MAX, UINT64_MAX, INT32_MIN, INT32_MAX = 2**32 - 1, 2**64 - 1, -(2**31), 2**31 - 1
"""Limits of integer fields in protobuf messages."""
MAX_CALLS, MAX_CONNECTIONS = 100_000, 60_000

log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]
Seconds = Annotated[float, Field(le=86_400)]
"""A duration of at most a day, which every timer supports."""
Host = Annotated[str, Field(min_length=1), AfterValidator(lambda host: host.strip("[]"))]
"""A host name or address. Brackets around an IPv6 address are optional."""
CoordinatorAddress = Annotated[str, Field(min_length=1), AfterValidator(partial(check_address, port=COORDINATOR_PORT))]
TargetAddress = Annotated[str, Field(min_length=1), AfterValidator(partial(check_address, port=TARGET_WORKER_PORT))]
TargetAddresses = Annotated[str, Field(min_length=1), AfterValidator(partial(check_addresses, port=TARGET_WORKER_PORT))]
DraftAddress = Annotated[str, Field(min_length=1), AfterValidator(partial(check_address, port=DRAFT_WORKER_PORT))]
DraftAddresses = Annotated[
    str, Field(min_length=1), AfterValidator(partial(check_named_addresses, port=DRAFT_WORKER_PORT))
]
"""Comma-separated addresses. Draft addresses may have names: NAME=ADDRESS."""

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base class of the settings of every process and command."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_parse_none_str=NO_VALUE,
        protected_namespaces=(),
        validate_by_name=True,
        validate_by_alias=True,
    )

    file: ClassVar[str | None] = None
    """The TOML file."""
    file_values: ClassVar[dict[str, Any]] = {}
    """Values read from it."""

    config: Path | None = Field(None, description="TOML file with settings")
    log_level: LogLevel = Field("info", description="minimum level of logged messages")

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `port = true` in a file, which pydantic would take for 1."""
        if isinstance(value, bool) and not _takes_booleans(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("Input should not be a boolean")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.file_values)

    @classmethod
    def load(cls, program: str, arguments: list[str] | None = None, other_settings: Iterable[str] = ()) -> Self:
        """Load the settings of this process. Print invalid settings with the reason and exit with status 2.

        `other_settings`: settings of other processes, whose variables may be set in this environment.
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            check_utf8(arguments)
            check_variables(cls.keys() | set(other_settings))
            resolved = _with_file(cls, program, config_file_of(arguments))
            source: CliSettingsSource[Any] = CliSettingsSource(
                resolved, formatter_class=argparse.RawDescriptionHelpFormatter, cli_exit_on_error=False
            )
            source.root_parser.add_argument("--version", action="version", version=f"{program} {package_version()}")
            show_options(source.root_parser, cls)
            return CliApp.run(resolved, arguments, cli_settings_source=source)
        except ValidationError as error:
            for problem in error.errors():
                print(f"{program}: {explain(cls, problem, resolved.file, resolved.file_values)}", file=sys.stderr)
        except (SettingsError, OSError, ValueError) as error:
            reason = str(error).removeprefix("error parsing CLI: ")
            print(f"{program}: {reason}{cls._similar_flags(reason)}", file=sys.stderr)
        raise SystemExit(2)

    @classmethod
    def keys(cls) -> set[str]:
        """Return the names of the settings in a TOML file."""
        return names_of_settings(cls)

    @classmethod
    def _similar_flags(cls, reason: str) -> str:
        """Return a suggestion for the unknown flags that argparse names."""
        words = [word.partition("=")[0] for word in reason.split() if word.startswith("--")]
        if not reason.startswith("unrecognized arguments: "):
            return ""
        return suggest(words, {key.replace("_", "-") for key in names_of_settings(cls)}, "--")

    def log_resolved(self) -> None:
        """Log the settings that differ from their defaults; at debug level, log all."""
        changed = self.model_dump(mode="json", exclude={"config", "parent_pid"}, exclude_defaults=True)
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())
        log.info("settings: %s", shown or "all defaults")
        log.debug("all settings: %s", self.model_dump_json(exclude={"config"}))


class ListeningSettings(Settings):
    """Settings of a process that listens."""

    host: Host = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free port")
    drain_seconds: Seconds = Field(30.0, ge=0, description="time for running calls to finish after SIGTERM")
    log_format: LogFormat = Field("text", description="log format: text, or json with one object per line")


class ProcessSettings(ListeningSettings):
    """Settings of a process that listens and may have a parent."""

    parent_pid: int | None = Field(None, ge=1, description="stop when this parent process exits; default: never")


class ServerSettings(ProcessSettings, ServerSecurity, TraceSettings):
    """Settings of every gRPC server."""

    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="second port for health checks only, without TLS and with its own limits; default: none",
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Prometheus port: GET /metrics over HTTP without TLS; default: none"
    )
    monitoring_host: Host | None = Field(
        None, description="address to listen on with health_port and metrics_port; default: host"
    )
    max_connections: int = Field(
        1024, ge=1, le=MAX_CONNECTIONS, description="maximum number of connections; further ones are closed"
    )
    max_calls: int = Field(
        4096,
        ge=1,
        le=MAX_CALLS,
        description="maximum number of calls in progress; a client above its fair share is refused first",
    )
    max_calls_per_client: int | None = Field(
        None, ge=1, le=MAX_CALLS, description="maximum number of calls in progress of one client; default: max_calls"
    )
    request_memory: ByteSize = Field(
        ByteSize(128 * 2**20), ge=1, description="memory for the requests of all calls; further requests are refused"
    )
    receive_seconds: Seconds = Field(10.0, gt=0, description="time for a request to arrive")
    stream_stall_seconds: Seconds = Field(60.0, gt=0, description="time without a read after which a stream fails")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = [port for port in (self.port, self.health_port, self.metrics_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError("--port, health_port and metrics_port must differ")
        return self


@contextmanager
def naming(program: str, setting: str, *errors: type[Exception]) -> Iterator[None]:
    """Exit with one line on stderr if the value of a setting cannot be used.

    `setting`: its name; empty if the message of the error begins with it.
    """
    try:
        yield
    except errors as error:
        reason: object = error
        if isinstance(error, OSError) and error.filename is not None:
            reason = f"{error.filename}: {error.strerror}"
        end_process(": ".join(filter(None, (program, setting, str(reason)))), 2)


def _takes_booleans(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_booleans, get_args(annotation)))


def _with_file(settings: type[S], program: str, path: str | None) -> type[S]:
    values = {} if path is None else read_config_file(Path(path))

    class Resolved(settings):  # type: ignore[misc, valid-type]
        __doc__ = settings.__doc__
        model_config = SettingsConfigDict(cli_prog_name=program)
        file, file_values = path, values

    return Resolved

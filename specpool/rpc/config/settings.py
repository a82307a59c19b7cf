"""Configuration of a process from flags, `SPECPOOL_*` environment variables and a TOML file, in order of precedence.

Every setting works in all three places. Unknown settings are errors.
"""

import argparse
import json
import logging
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ByteSize, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specpool.rpc.observability.logs import LogFormat
from specpool.rpc.observability.trace_settings import TraceSettings
from specpool.rpc.security.settings import ServerSecurity

ENV_PREFIX = "SPECPOOL_"

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

    file_values: ClassVar[dict[str, Any]] = {}
    """Values read from the TOML file."""

    config: Path | None = Field(None, description="TOML file with settings")
    log_level: LogLevel = Field("info", description="minimum level of logged messages")

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
            _check_utf8(arguments)
            _check_variable_names(cls.keys() | set(other_settings))
            resolved = _with_file(cls, program, _config_file(arguments))
            source: CliSettingsSource[Any] = CliSettingsSource(
                resolved, formatter_class=_HelpFormatter, cli_exit_on_error=False
            )
            return CliApp.run(resolved, arguments, cli_settings_source=source)
        except ValidationError as error:
            for problem in error.errors():
                key = ".".join(str(part) for part in problem["loc"]).replace("_", "-")  # empty if settings conflict
                reason = problem["msg"].removeprefix("Value error, ")
                if problem["type"] == "extra_forbidden":
                    key, reason = "config", f"unknown setting {'.'.join(map(str, problem['loc']))}"
                print(": ".join(filter(None, (program, key, reason))), file=sys.stderr)
        except (SettingsError, OSError, ValueError) as error:
            reason = str(error).removeprefix("error parsing CLI: ")
            print(f"{program}: {reason}", file=sys.stderr)
        raise SystemExit(2)

    @classmethod
    def keys(cls) -> set[str]:
        """Return the names of the settings in a TOML file, deprecated names included."""
        return names_of_settings(cls)

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


class ServerSettings(ListeningSettings, ServerSecurity, TraceSettings):
    """Settings of every Specpool server."""

    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="second port for health checks only, without TLS and with its own limits; default: none",
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Prometheus port: GET /metrics over HTTP without TLS; default: none"
    )
    max_connections: int = Field(
        1024, ge=1, le=MAX_CONNECTIONS, description="maximum number of open connections; others are closed at once"
    )
    max_calls: int = Field(
        4096, ge=1, le=MAX_CALLS, description="maximum number of calls in progress; others are refused"
    )
    max_calls_per_client: int | None = Field(
        None, ge=1, le=MAX_CALLS, description="maximum number of calls in progress of one client; default: max_calls"
    )
    request_memory: ByteSize = Field(
        ByteSize(128 * 2**20), ge=1, description="memory for the requests of all calls; further requests are refused"
    )
    receive_seconds: Seconds = Field(10.0, gt=0, description="time for a request to arrive once the server reads it")

    parent_pid: int | None = Field(None, ge=1, description="stop when this parent process exits; default: never")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = [port for port in (self.port, self.health_port, self.metrics_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError("port, health_port and metrics_port must differ")
        return self


def names_of_settings(model: type[BaseModel]) -> set[str]:
    """Return every name that sets a field of the model, deprecated names included."""
    names = set()
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        names |= {str(key) for key in alias.choices} if isinstance(alias, AliasChoices) else {str(alias or name)}
    return names


@contextmanager
def naming(program: str, setting: str, *errors: type[Exception]) -> Iterator[None]:
    """Exit with one line on stderr if the value of a setting cannot be used.

    `setting`: its name; empty if the message of the error begins with it.
    """
    try:
        yield
    except errors as error:
        print(": ".join(filter(None, (program, setting, str(error)))), file=sys.stderr)
        raise SystemExit(2) from None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Omits defaults that say nothing, such as None and names of functions."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.sub(rf" \(default: {NO_VALUE}\)| \(default factory: .*\)| \(default: \(\)\)", "", action.help or "")


def _check_utf8(arguments: list[str]) -> None:
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)]
    for word in (*arguments, *variables):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{word!a} is not UTF-8") from None


def _check_variable_names(keys: set[str]) -> None:
    known = {ENV_PREFIX + key.upper() for key in keys}
    unknown = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}")


def _config_file(arguments: list[str]) -> str | None:
    variables = {name.upper(): value for name, value in os.environ.items()}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default=variables.get(ENV_PREFIX + "CONFIG"))
    try:
        path: str | None = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    return path


def _with_file(settings: type[S], program: str, path: str | None) -> type[S]:
    class Resolved(settings):  # type: ignore[misc, valid-type]
        __doc__ = settings.__doc__
        model_config = SettingsConfigDict(cli_prog_name=program)
        file_values = {} if path is None else _read_file(Path(path))

    return Resolved


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"config: no such file: {path}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    if "config" in values:
        raise ValueError(f"config: {path}: a config file cannot name another config file")
    return values

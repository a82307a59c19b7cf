"""Configuration of a process from flags, `SPECPOOL_*` variables and a TOML file, in this order of precedence.

Every key can be given in each of the three ways. Unknown flags and file keys are refused; so are unknown
variables, where the environment belongs to the process alone.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

ENV_PREFIX = "SPECPOOL_"

log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base of all."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        protected_namespaces=(),
    )

    owns_environment: ClassVar[bool] = False
    """Whether every `SPECPOOL_*` variable must be meant for this process, as in a container of its own."""

    config: Path | None = Field(None, description="TOML file with any of these settings")
    log_level: LogLevel = Field("info", description="least severe messages logged")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, program: str, arguments: list[str] | None = None) -> Self:
        """Reads the settings of this process; on bad ones says which and why, and exits with status 2."""
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            if cls.owns_environment:
                refuse_unknown_variables(cls)
            return CliApp.run(_with_file(cls, program, _config_file(arguments)), arguments)
        except ValidationError as error:
            for problem in error.errors():
                key = ".".join(str(part) for part in problem["loc"]).replace("_", "-")  # none if several disagree
                print(": ".join(filter(None, (program, key, problem["msg"]))), file=sys.stderr)
        except (SettingsError, OSError, ValueError) as error:
            print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2)

    def log_resolved(self) -> None:
        """Logs what the process runs with, wherever each value came from."""
        log.info("settings: %s", self.model_dump_json(exclude={"config"}))


class ServerSettings(Settings):
    """What every Specpool server has."""

    owns_environment = True

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    drain_seconds: float = Field(30.0, ge=0, description="time that running calls get after SIGTERM")


def refuse_unknown_variables(settings: type[BaseSettings], environment: dict[str, str] | None = None) -> None:
    """Raises ValueError for a `SPECPOOL_*` variable that is none of `settings`: most likely a misspelt one."""
    environment = dict(os.environ) if environment is None else environment
    known = {ENV_PREFIX + name.upper() for name in settings.model_fields}
    unknown = sorted(name for name in environment if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}")


def _config_file(arguments: list[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=os.environ.get(ENV_PREFIX + "CONFIG"))
    path: str | None = parser.parse_known_args(arguments)[0].config
    if path is not None and not Path(path).is_file():
        raise ValueError(f"config: no such file: {path}")
    return path


def _with_file(settings: type[S], program: str, path: str | None) -> type[S]:
    class Resolved(settings):  # type: ignore[misc, valid-type]
        __doc__ = settings.__doc__
        model_config = SettingsConfigDict(toml_file=path, cli_prog_name=program)

    return Resolved

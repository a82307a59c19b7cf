"""Settings of `specpool up` for its callers: security, OpenAI's HTTP API, health checks and traces."""

import contextlib
from typing import Self

from pydantic import Field, model_validator

from specpool.cli.up_settings import UpSettings
from specpool.openai.settings import HTTP_PORT
from specpool.rpc.observability.tracing import TraceSettings
from specpool.rpc.ports import is_loopback
from specpool.rpc.security.settings import ServerSecurity


class SecureUpSettings(UpSettings, ServerSecurity, TraceSettings):
    __doc__ = UpSettings.__doc__

    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of OpenAI's HTTP API, with the coordinator's certificate and tokens; 0: none; "
        f"default: {HTTP_PORT} if host is a loopback address and allowed_names is not given",
    )
    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="second port of the coordinator for health checks only, without TLS; default: none. Workers answer "
        "health checks on their own ports, on the loopback interface",
    )

    @property
    def api_port(self) -> int | None:
        """The port of OpenAI's API, or None without it."""
        if self.http_port is not None:
            return self.http_port or None
        return HTTP_PORT if not self.allowed_names and _is_loopback(self.host) else None

    def _ports(self) -> dict[str, int]:
        given = {"port": self.port, "health-port": self.health_port, "http-port": self.api_port}
        return {name: port for name, port in given.items() if port is not None}

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        if self.http_port and self.allowed_names:
            raise ValueError("http_port must not be given with allowed_names, which only the coordinator checks")
        return self


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(OSError):  # startup reports a host that does not resolve
        return is_loopback(host)
    return False

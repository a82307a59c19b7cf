"""Settings of the HTTP server."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator

from specpool.rpc.config.settings import MAX_CONNECTIONS, ProcessSettings, Seconds
from specpool.rpc.security.channel import (
    COORDINATOR_PORT,
    Connector,
    SecurityOptions,
    check_addresses,
    join_address,
    split_addresses,
)
from specpool.rpc.security.settings import ServerTls

HTTP_PORT = 8000


def _check(addresses: str) -> str:
    return check_addresses(addresses, COORDINATOR_PORT)


class OpenAISettings(ProcessSettings, ServerTls):
    """Serves OpenAI's HTTP API as a client of coordinators."""

    port: int = Field(HTTP_PORT, ge=0, le=65535, description="port to listen on; 0: any free port")
    coordinator_address: Annotated[str, Field(min_length=1), AfterValidator(_check)] = Field(
        join_address("127.0.0.1", COORDINATOR_PORT),
        description="comma-separated host:port of the coordinators; dns:///host:port: all addresses of the name",
    )
    coordinator_tls_ca: Path | None = Field(
        None, description="PEM file of the CA that signed the coordinators' certificates; enables TLS to them"
    )
    coordinator_tls_cert: Path | None = Field(
        None, description="PEM file of this server's certificate for coordinators (mutual TLS)"
    )
    coordinator_tls_key: Path | None = Field(
        None, description="PEM file of that certificate's key, without a passphrase"
    )
    coordinator_tls_name: str | None = Field(
        None, min_length=1, description="name in the coordinators' certificates; default: the host of the address"
    )
    max_connections: int = Field(
        1024, ge=1, le=MAX_CONNECTIONS, description="maximum number of connections and requests; further ones get 503"
    )
    max_body_bytes: ByteSize = Field(ByteSize(2 * 2**20), ge=1, description="maximum size of a request's body")
    max_header_bytes: ByteSize = Field(ByteSize(16 * 2**10), ge=256, description="maximum size of a request's headers")
    receive_seconds: Seconds = Field(10.0, gt=0, description="time for a request's body to arrive")
    keep_alive_seconds: int = Field(30, ge=1, le=86_400, description="time after which an idle connection is closed")
    stream_stall_seconds: Seconds = Field(
        60.0, ge=1, description="time without a read after which a client's connection is closed"
    )

    @property
    def coordinators(self) -> list[str]:
        """Addresses of the coordinators."""
        return split_addresses(self.coordinator_address)

    @property
    def coordinator_security(self) -> SecurityOptions:
        return SecurityOptions(
            tls_ca=self.coordinator_tls_ca,
            tls_cert=self.coordinator_tls_cert,
            tls_key=self.coordinator_tls_key,
            tls_name=self.coordinator_tls_name,
        )

    @model_validator(mode="after")
    def _check_coordinator_tls(self) -> Self:
        try:
            Connector("", **self.coordinator_security)
        except ValueError as error:
            raise ValueError(str(error).replace("tls_", "coordinator_tls_")) from None
        return self

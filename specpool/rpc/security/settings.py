"""Security settings of servers, and of commands that connect to one."""

from pathlib import Path
from typing import Annotated, Self, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from specpool.rpc.security.channel import Connector, SecurityOptions
from specpool.rpc.security.tls import TlsFiles
from specpool.rpc.security.tokens import ApiTokens


def _split(value: object) -> object:
    """Split comma-separated text, as in flags and environment variables."""
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() if isinstance(part, str) else part for part in parts] if isinstance(parts, list) else parts


Names: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_split)]


class ServerTls(BaseModel, frozen=True):
    """TLS of a server."""

    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate; connections must then use TLS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key, without a passphrase")
    tls_ca: Path | None = Field(
        None, description="PEM file of a CA; clients must present a certificate signed by it (mutual TLS)"
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The server's TLS files, or None without TLS. Raises ValueError unless certificate and key are both set."""
        files = TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        return files if files.cert is not None else None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        files = self.tls_files
        if files is not None:
            files.load()
        elif self.tls_ca is not None:
            raise ValueError("tls_ca: must be given with tls_cert and tls_key")
        return self


class ServerSecurity(ServerTls, frozen=True):
    """Who may connect to a gRPC server, and how."""

    allowed_names: Names = Field(
        (),
        description="comma-separated names (DNS, URI or common name); client certificates must have one of them; "
        "default: any certificate signed by tls_ca",
    )
    api_tokens: Path | None = Field(
        None, description="file with lines NAME TOKEN; calls must present one of these API tokens"
    )
    reflection: bool = Field(
        True, description="serve gRPC reflection, which describes services and messages to clients"
    )

    @model_validator(mode="after")
    def _check_callers(self) -> Self:
        if self.allowed_names and self.tls_ca is None:
            raise ValueError("allowed_names: must be given with tls_ca")
        if self.api_tokens is not None:
            ApiTokens(self.api_tokens)
        return self


class ClientSecurity(BaseModel, frozen=True):
    """How a command connects to a coordinator."""

    tls_ca: Path | None = Field(
        None, description="PEM file of the CA that signed the server's certificate; enables TLS"
    )
    tls_cert: Path | None = Field(None, description="PEM file of the client's certificate (mutual TLS)")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key, without a passphrase")
    tls_name: str | None = Field(
        None, min_length=1, description="name in the server's certificate; default: the host of the address"
    )
    token_file: Path | None = Field(None, description="file with the API token")

    @property
    def security(self) -> SecurityOptions:
        """These settings as options of `Connector` and the clients."""
        names = ("tls_ca", "tls_cert", "tls_key", "tls_name", "token_file")
        return cast(SecurityOptions, {name: getattr(self, name) for name in names})

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        Connector("", **self.security)
        return self

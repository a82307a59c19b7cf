"""Settings of security: those that every server has, and those of a command that connects to one."""

from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from specpool.rpc.security.channel import Connector, SecurityOptions
from specpool.rpc.security.tls import TlsFiles
from specpool.rpc.security.tokens import ApiTokens


def _split(value: object) -> object:
    """The parts of a text that commas separate, as in flags and variables."""
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() if isinstance(part, str) else part for part in parts] if isinstance(parts, list) else parts


Names: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_split)]


class ServerSecurity(BaseModel, frozen=True):
    """Who may connect to a server, and how."""

    tls_cert: Path | None = Field(
        None, description="certificate of this server, a PEM file; with it, connections must use TLS"
    )
    tls_key: Path | None = Field(None, description="key of that certificate, a PEM file without passphrase")
    tls_ca: Path | None = Field(
        None, description="clients must show a certificate that this CA has signed (mutual TLS); a PEM file"
    )
    allowed_names: Names = Field(
        (),
        description="accept only client certificates with one of these names (DNS or URI name, or common name), "
        "separated by commas; default: any that tls_ca has signed",
    )
    api_tokens: Path | None = Field(
        None, description="accept only calls that bring one of the API tokens in this file of lines NAME TOKEN"
    )
    reflection: bool = Field(
        True, description="tell clients which services and messages there are (gRPC server reflection)"
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of the server's TLS; None without TLS. ValueError for a certificate without key, or the reverse."""
        files = TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        return files if files.cert is not None else None

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        files = self.tls_files
        if files is not None:
            files.load()
        elif self.tls_ca is not None:
            raise ValueError("tls_ca: must be given with tls_cert and tls_key")
        if self.allowed_names and self.tls_ca is None:
            raise ValueError("allowed_names: must be given with tls_ca, which vouches for the names")
        if self.api_tokens is not None:
            ApiTokens(self.api_tokens)
        return self


class ClientSecurity(BaseModel, frozen=True):
    """How a command connects to a coordinator."""

    tls_ca: Path | None = Field(
        None, description="use TLS; the server's certificate must be signed by this CA, a PEM file"
    )
    tls_cert: Path | None = Field(None, description="certificate to show to the server (mutual TLS), a PEM file")
    tls_key: Path | None = Field(None, description="key of that certificate, a PEM file without passphrase")
    tls_name: str | None = Field(
        None, min_length=1, description="name in the server's certificate; default: the host of the address"
    )
    token_file: Path | None = Field(None, description="file with the API token to send")

    @property
    def security(self) -> SecurityOptions:
        """These settings as options of `Connector` and the clients."""
        return SecurityOptions(
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_name=self.tls_name,
            token_file=self.token_file,
        )

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        Connector("", **self.security)
        return self

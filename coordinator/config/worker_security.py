"""Settings of the connections from the coordinator to its workers."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from specpool.rpc.security.channel import Connector, SecurityOptions
from specpool.rpc.security.settings import ServerSecurity
from specpool.rpc.security.tls import TlsFiles
from specpool.rpc.security.tokens import token_of


class WorkerSecurity(ServerSecurity, frozen=True):
    """How the coordinator connects to its workers; defaults to the files of its own server."""

    worker_tls: bool | None = Field(None, description="use TLS to the workers; default: if a CA is set")
    worker_tls_ca: Path | None = Field(
        None, description="PEM file with the CA of the workers' certificates; default: tls_ca"
    )
    worker_tls_cert: Path | None = Field(
        None, description="PEM file with the client certificate for the workers; default: tls_cert"
    )
    worker_tls_key: Path | None = Field(None, description="PEM file with its key; default: tls_key")
    worker_tls_name: str | None = Field(
        None, min_length=1, description="name in the workers' certificates; default: the host of their address"
    )
    worker_token: Path | None = Field(None, description="file with the API token for the workers")

    @property
    def worker_security(self) -> SecurityOptions:
        """Options of the connectors to both workers."""
        security = SecurityOptions(token_file=self.worker_token)
        ca = self.worker_tls_ca or self.tls_ca
        if self.worker_tls is False or ca is None:
            return security
        use_own = self.worker_tls_cert is None
        return security | SecurityOptions(
            tls_ca=ca,
            tls_cert=self.tls_cert if use_own else self.worker_tls_cert,
            tls_key=self.tls_key if use_own else self.worker_tls_key,
            tls_name=self.worker_tls_name,
        )

    @model_validator(mode="after")
    def _check_worker_security(self) -> Self:
        if self.worker_tls and self.worker_tls_ca is None and self.tls_ca is None:
            raise ValueError("worker_tls: must be given with worker_tls_ca, the CA of the workers")
        TlsFiles(self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key, prefix="worker_").load()
        token_of(None, self.worker_token, setting="worker_token")
        security = self.worker_security
        for name in ("worker_tls_ca", "worker_tls_cert", "worker_tls_name") if "tls_ca" not in security else ():
            if getattr(self, name) is not None:
                required = "worker_tls_ca" if self.worker_tls is None else "worker_tls, which is off"
                raise ValueError(f"{name}: must be given with {required}")
        Connector("", **security)
        return self

"""TLS credentials of servers and clients, from PEM files that are reloaded when they change."""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""Minimum time between two checks of the files."""

T = TypeVar("T")

Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """The loaded contents of files. Keeps the last valid contents while changed files are invalid."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Load the files once. `load` raises a ValueError, whose text may be logged, for invalid files."""
        self._paths, self._load = paths, load
        self._seen = self._signature()
        self._loaded = load()
        self._checked = time.monotonic()

    def current(self) -> T:
        """Return the contents, at most `CHECK_SECONDS` old. Never raises."""
        if time.monotonic() < self._checked + CHECK_SECONDS:
            return self._loaded
        self._checked = time.monotonic()
        while (signature := self._signature()) != self._seen:
            self._seen = signature
            try:
                loaded = self._load()
            except ValueError as error:
                log.error("cannot use changed files; keeping the previous contents: %s", error)
                continue
            if self._signature() == signature:  # otherwise they changed while being read
                self._loaded = loaded
                log.info("reloaded %s", ", ".join(map(str, self._paths)))
        return self._loaded

    def _signature(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file, or with the target of a link. None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


@dataclass(frozen=True)
class Pem:
    """Contents of the PEM files of one endpoint."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one endpoint: the CA that signs its peers' certificates, and its certificate and key.

    `prefix`: prefix of the names of settings in errors.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            missing, given = ("key", "cert") if self.key is None else ("cert", "key")
            raise ValueError(f"{self.prefix}tls_{missing}: must be given with {self.prefix}tls_{given}")

    def load(self) -> Pem:
        """Read the files. Raises ValueError with the setting's name for an unusable file."""
        key = None if self.key is None else self._read("key", self.key)
        pem = Pem(self._certificates("ca", self.ca), self._certificates("cert", self.cert), key)
        if self.cert is not None:
            self._check_pair(self.cert)
        return pem

    def reloaded(self) -> Reloaded[Pem]:
        """Return the contents, reloaded after each change. Raises ValueError as `load` does."""
        return Reloaded(self.paths, self.load)

    @property
    def paths(self) -> list[Path]:
        """The files that are set."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def _certificates(self, part: str, path: Path | None) -> bytes | None:
        if path is None:
            return None
        content = self._read(part, path)
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=content.decode("ascii", errors="ignore"))
        except (ssl.SSLError, ValueError):
            raise ValueError(f"{self.prefix}tls_{part}: {path} contains no PEM certificate") from None
        return content

    def _read(self, part: str, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.prefix}tls_{part}: {path}: {error.strerror}") from None

    def _check_pair(self, cert: Path) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, self.key, password=_refuse_encrypted)
        except ssl.SSLError as error:
            reason = f" ({error.reason})" if error.reason else ""
            raise ValueError(f"{self.prefix}tls_key: {self.key} is not the key of {cert}{reason}") from None
        except _EncryptedError:
            raise ValueError(f"{self.prefix}tls_key: {self.key} is encrypted; remove its passphrase") from None
        except OSError as error:
            raise ValueError(f"{self.prefix}tls_key: {self.key}: {error.strerror}") from None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return the credentials of a server. Every handshake uses the current files.

    With a CA, clients must present a certificate signed by it. Raises ValueError as `TlsFiles.load` does.
    """
    files_now = files.reloaded()
    served = files_now.current()

    def changed() -> Any:
        """Return the new configuration, or None if nothing changed."""
        nonlocal served
        if (current := files_now.current()) == served:
            return None
        served = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), changed, require_client_authentication=files.ca is not None
    )


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.cert is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context of the standard library that verifies servers like gRPC's channels."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is its own trust anchor
    context.load_verify_locations(files.ca)
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


class _EncryptedError(Exception):
    """The key needs a passphrase."""


def _refuse_encrypted() -> str:
    raise _EncryptedError

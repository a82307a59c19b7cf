"""Certificates for tests, created with `openssl`."""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOKEN, OTHER_TOKEN = "token-of-alice-0123456789", "token-of-bob-0123456789"


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path

    @property
    def options(self) -> dict[str, Path]:
        """Return both files as options of servers and clients."""
        return {"tls_cert": self.cert, "tls_key": self.key}

    def copy_from(self, other: "Certificate") -> None:
        """Replace both files one after the other, like a rotation."""
        replace(self.cert, other.cert.read_bytes())
        replace(self.key, other.key.read_bytes())


class Authority:
    """A CA; `path` is its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self.path, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        make = ["req", "-x509", *NEW_KEY, "-days", "2", "-subj", f"/CN={name}"]
        openssl(*make, "-keyout", self._key, "-out", self.path)

    def issue(
        self,
        name: str,
        alternative: Iterable[str] = ("DNS:localhost", "IP:127.0.0.1"),
        common_name: str | None = None,
        days: int = 1,
    ) -> Certificate:
        """Issue a certificate with these subject alternative names.

        `common_name` defaults to `name`, which also names the files. A certificate of -1 `days` expired yesterday.
        """
        certificate = Certificate(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        request, extensions = certificate.cert.with_suffix(".csr"), certificate.cert.with_suffix(".ext")
        openssl("req", *NEW_KEY, "-subj", f"/CN={common_name or name}", "-keyout", certificate.key, "-out", request)
        names = ",".join(alternative)
        extensions.write_text(f"subjectAltName={names}\n" if names else "basicConstraints=CA:FALSE\n")
        signed_by = ["-CA", self.path, "-CAkey", self._key, "-CAcreateserial", "-days", days, "-extfile", extensions]
        openssl("x509", "-req", "-in", request, *signed_by, "-out", certificate.cert)
        return certificate


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: object) -> None:
    """Run `openssl`, which must be installed."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def replace(path: Path, content: bytes | str) -> None:
    """Replace a file atomically."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(path)


def remove(path: Path) -> None:
    path.unlink()

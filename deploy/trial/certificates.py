"""A CA of the trial's own, and a certificate for each host, made by `openssl` as docs/security.md says."""

from pathlib import Path

from deploy.trial.namespaces import run
from specpool.rpc.security.channel import SecurityOptions

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A CA whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cert, self._key = folder / "ca.pem", folder / "ca.key"
        files = ("-keyout", str(self._key), "-out", str(self._cert))
        run("openssl", "req", "-x509", *NEW_KEY, "-days", "1", "-subj", "/CN=specpool-trial-ca", *files)

    def issue(self, name: str, address: str) -> SecurityOptions:
        """A certificate under this name for the host with this address, as options of a server or a client that speaks
        mutual TLS."""
        cert, key, request = (self._folder / f"{name}.{ending}" for ending in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}")
        run("openssl", "req", *NEW_KEY, *subject, "-keyout", str(key), "-out", str(request))
        signed_by = ("-CA", str(self._cert), "-CAkey", str(self._key), "-CAcreateserial", "-days", "1")
        copied = ("-copy_extensions", "copy", "-out", str(cert))
        run("openssl", "x509", "-req", "-in", str(request), *signed_by, *copied)
        return SecurityOptions(tls_ca=self._cert, tls_cert=cert, tls_key=key)

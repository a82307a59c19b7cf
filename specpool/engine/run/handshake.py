"""The start of a connection between nodes: each end proves that it knows the master secret, then the rank says hello.

Rank 0 sends whether it has a secret, and a nonce. With a secret, the rank answers with its own nonce and proof, and
rank 0 sends its proof. Rank 0 proves nothing to a stranger. Callers limit the time.
"""

import asyncio
import hmac
import secrets
import socket
from typing import Literal

from pydantic import BaseModel

from specpool.engine.config.options import EngineOptions
from specpool.environment.process import package_version

HELLO_BYTES = 1 << 16
NONCE_BYTES = PROOF_BYTES = 32
NODE_OPTIONS = {"device", "threads", "node_rank", "master_secret_file"}
"""Options in which nodes may differ."""


class RefusedError(Exception):
    """Why one end refuses the other."""


class Version(BaseModel):
    """What a hello of any version has."""

    version: str


class Hello(Version):
    """From a rank of another node: its version and options."""

    options: EngineOptions
    rank: str
    """Random name of the rank, the same on both of its connections."""
    channel: Literal["commands", "data"]

    @classmethod
    def of(cls, options: EngineOptions, rank: str = "", channel: Literal["commands", "data"] = "commands") -> "Hello":
        """The hello of this version with these options."""
        return cls(version=package_version(), options=options, rank=rank, channel=channel)

    def differs_from(self, other: "Hello") -> str | None:
        """The first option that must be equal on both nodes but differs; None if there is none."""
        own, others = (hello.options.model_dump(exclude=NODE_OPTIONS) for hello in (self, other))
        return next((name for name, value in own.items() if others[name] != value), None)


async def receive_hello(peer: socket.socket, own: Hello, secret: bytes | None) -> Hello:
    """As rank 0: check the secret of a peer and read its hello. RefusedError, OSError, ValidationError."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(peer, bytes([secret is not None]) + nonce)
    if secret is not None:
        other = await _read(peer, NONCE_BYTES)
        if not hmac.compare_digest(await _read(peer, PROOF_BYTES), _proof(secret, b"rank", nonce, other)):
            raise RefusedError("it does not know the secret of --master-secret-file")
        await loop.sock_sendall(peer, _proof(secret, b"rank 0", nonce, other))
    size = int.from_bytes(await _read(peer, 4))
    if size > HELLO_BYTES:
        raise RefusedError(f"its hello is longer than {HELLO_BYTES} bytes")
    message = await _read(peer, size)
    if Version.model_validate_json(message).version != own.version:  # its options may have other names
        raise RefusedError("it has another version")
    hello = Hello.model_validate_json(message)
    if (different := own.differs_from(hello)) is not None:
        raise RefusedError(f"it was started with another {different}")
    return hello


async def send_hello(peer: socket.socket, hello: Hello, secret: bytes | None) -> None:
    """As a rank of another node: check the secret of rank 0, then say hello. RefusedError, OSError."""
    loop = asyncio.get_running_loop()
    has_secret, *nonce = await _read(peer, 1 + NONCE_BYTES)
    if has_secret != (secret is not None):
        where = "it has no --master-secret-file" if secret else "it has a --master-secret-file, which this node lacks"
        raise RefusedError(where)
    if secret is not None:
        own = secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(peer, own + _proof(secret, b"rank", bytes(nonce), own))
        try:
            proof = await _read(peer, PROOF_BYTES)
        except OSError:
            raise RefusedError("it does not accept the secret of --master-secret-file") from None
        if not hmac.compare_digest(proof, _proof(secret, b"rank 0", bytes(nonce), own)):
            raise RefusedError("it does not know the secret of --master-secret-file")
    message = hello.model_dump_json().encode()
    await loop.sock_sendall(peer, len(message).to_bytes(4) + message)


def _proof(secret: bytes, role: bytes, nonce: bytes, other: bytes) -> bytes:
    """Proof that one role knows the secret. `nonce`: from rank 0. `other`: from the rank."""
    return hmac.digest(secret, role + b":" + nonce + other, "sha256")


async def _read(peer: socket.socket, size: int) -> bytes:
    data, loop = b"", asyncio.get_running_loop()
    while len(data) < size:
        received = await loop.sock_recv(peer, size - len(data))
        if not received:
            raise ConnectionError("the connection was closed")
        data += received
    return data

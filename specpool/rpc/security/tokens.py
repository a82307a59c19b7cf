"""API tokens: the server's file of callers, and the token that a client sends."""

import hmac
import re
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from specpool.rpc.security.tls import Reloaded

HEADER = "authorization"
MIN_TOKEN_LENGTH, MAX_TOKEN_LENGTH = 16, 1024
MAX_TOKENS = 1000
"""Every call is compared with all tokens."""

# Token syntax of RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_KINDS_OF_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

C = TypeVar("C")
Token: TypeAlias = Callable[[], str]
"""Returns the current token of a client."""


class ApiTokens:
    """Known callers, from a file with lines `NAME TOKEN`. Only digests of tokens are kept.

    A name may have several tokens, so that tokens can be rotated.
    """

    def __init__(self, path: Path, setting: str = "api_tokens") -> None:
        """Raise ValueError with the `setting` and the line, but without tokens, if the file is invalid."""
        self._callers = Reloaded([path], partial(_read_callers, path, setting))

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
        """Return the name of the caller, or None without a known token. Runs in constant time."""
        presented = [value for key, value in metadata or () if key == HEADER]
        if len(presented) != 1:
            return None
        [value] = presented
        scheme, _, token = (value.decode(errors="replace") if isinstance(value, bytes) else value).partition(" ")
        digest = _digest(token.strip())
        caller = None
        for known, name in self._callers.current():
            if hmac.compare_digest(digest, known):
                caller = name
        return caller if scheme.lower() == "bearer" else None


def token_of(token: str | None, file: Path | None, setting: str = "token_file") -> Token | None:
    """Return the token of a client, from `token` or from a file that is reloaded when it changes. None without either.

    Raises ValueError with "token" or the `setting` of the file, but without the token itself, if the token is invalid.
    """
    if token is not None and file is not None:
        raise ValueError(f"token: must not be given with {setting}")
    if token is not None:
        checked = _checked(token, "token")
        return lambda: checked
    return Reloaded([file], partial(_read_token, file, setting)).current if file is not None else None


def bearing(channel: C, token: Token) -> C:
    """Return the channel, blocking or asyncio, with the token in the metadata of every call."""
    for kind in _KINDS_OF_CALLS:
        setattr(channel, kind, partial(_bearing_calls, getattr(channel, kind), token))
    return channel


def _bearing_calls(make: Callable[..., Any], token: Token, *method: Any, **options: Any) -> "_Calls":
    return _Calls(make(*method, **options), token)


class _Calls:
    """Calls of one method, started in any way the channel offers (`with_call`, `future`)."""

    def __init__(self, begin: Any, token: Token) -> None:
        self._begin, self._token = begin, token

    def __call__(self, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        header = (HEADER, f"Bearer {self._token()}")
        return self._begin(*arguments, metadata=(*(metadata or ()), header), **options)

    def __getattr__(self, name: str) -> "_Calls":
        return _Calls(getattr(self._begin, name), self._token)


def _read_callers(path: Path, setting: str) -> list[tuple[bytes, str]]:
    """Return the digest and the caller's name of every token."""
    callers: dict[bytes, str] = {}
    for number, line in enumerate(_read(path, setting).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{setting}: {path}: line {number}"
        if len(words) != 2:
            raise ValueError(f"{where}: must be NAME TOKEN")
        name, token = words
        if callers.setdefault(_digest(_checked(token, where)), name) != name:
            raise ValueError(f"{where}: {name} has the same token as another name")
    if not callers:
        raise ValueError(f"{setting}: {path} contains no tokens")
    if len(callers) > MAX_TOKENS:
        raise ValueError(f"{setting}: {path} has {len(callers)} tokens, more than the maximum of {MAX_TOKENS}")
    return [*callers.items()]


def _read_token(path: Path, setting: str) -> str:
    return _checked(_read(path, setting).strip(), f"{setting}: {path}")


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{setting}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{setting}: {path} is not UTF-8") from None


def _checked(token: str, where: str) -> str:
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        limits = f"{MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} characters"
        raise ValueError(f"{where}: a token must have {limits}, not {len(token)}")
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{where}: a token must consist of letters, digits and -._~+/, and may end with =")
    return token


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="replace")).digest()

"""The tool calls of one answer."""

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from specpool.openai.deltas import CallArguments, CallStart

ALPHANUMERICS = string.ascii_letters + string.digits


class Calls:
    """Numbers the calls of an answer. Only functions of the request can be called."""

    def __init__(self, schemas: Mapping[str, Any], parallel: bool, new_id: Callable[[], str]) -> None:
        """`schemas`: parameter schemas by function name. `parallel`: whether the answer may have several calls."""
        self.schemas = schemas
        self._parallel = parallel
        self._new_id = new_id
        self._count = 0

    @property
    def are_complete(self) -> bool:
        """Whether the answer can have no more calls."""
        return self._count > 0 and not self._parallel

    def start(self, name: str) -> CallStart:
        """Return the beginning of the next call."""
        self._count += 1
        return CallStart(self._count - 1, self._new_id(), name)

    def arguments(self, text: str) -> CallArguments:
        """Return arguments of the current call."""
        return CallArguments(self._count - 1, text)


def new_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def new_mistral_id() -> str:
    """Return an id of nine alphanumeric characters, which Mistral's chat templates require."""
    return "".join(secrets.choice(ALPHANUMERICS) for _ in range(9))

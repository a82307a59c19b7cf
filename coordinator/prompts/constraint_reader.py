"""Converts a request's constraint to a grammar, after cheap checks."""

import hashlib
import json
import math
import time
from asyncio import Event
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import astuple

from coordinator.prompts.tokenizer_pool import Check, Constraint, LimitError, PromptError, TokenizerPool
from specpool.environment.extras import explain_missing
from specpool.protocol.codec import MAX_GRAMMAR_LENGTH
from specpool.protocol.errors import InvalidArgumentError, UnimplementedError
from specpool.v1 import generation_pb2 as pb

MAX_BYTES = 65_536
MAX_CHOICES = 1024
# Maximum number of cached grammars and refusals.
MAX_RESULTS = 256
# How long a refusal is cached that may depend on the load of the machine.
LIMIT_SECONDS = 60.0
JSON_KINDS = {"json_schema", "json_object", "structural_tag"}
"""Constraints that describe JSON."""
ANY_OBJECT = '{"type": "object"}'


def constraint_field(kind: str) -> str:
    """Return the path of a constraint's field in a request."""
    return f"sampling_params.{kind}"


def read_constraint(params: pb.SamplingParams) -> Constraint | None:
    """Return a request's constraint, if any, after cheap checks. Raises InvalidArgumentError."""
    kind = params.WhichOneof("constraint")
    if params.json_whitespace and kind not in JSON_KINDS:
        refusal = "must be given with json_schema, json_object or structural_tag"
        raise InvalidArgumentError("sampling_params.json_whitespace", refusal)
    if kind is None:
        return None
    if params.ignore_eos:
        refusal = f"cannot be combined with {kind}: a complete answer ends with the end-of-sequence token"
        raise InvalidArgumentError("sampling_params.ignore_eos", refusal)
    if kind == "choice":
        text = json.dumps(_choices(params.choice.choices), ensure_ascii=False)
    elif kind == "json_object":
        if not params.json_object:
            raise InvalidArgumentError(constraint_field(kind), "must be true or unset")
        text = ANY_OBJECT
    else:
        text = getattr(params, kind)
        if not text and kind != "regex":
            raise InvalidArgumentError(constraint_field(kind), "must not be empty")
    return Constraint(kind, text, params.json_whitespace)


class ConstraintReader:
    """Compiles constraints in prompt processes, and caches the results."""

    def __init__(self, pool: TokenizerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._missing = explain_missing("constraints")
        self._results: OrderedDict[bytes, tuple[str | PromptError, float]] = OrderedDict()
        """Grammars and refusals with their expiry, by digest of the constraint, least recently used first."""
        self._compiling: dict[tuple[str, bytes], Event] = {}
        """Running compilations by client and digest. Clients do not wait for each other's turns."""

    def check(self, constraint: Constraint) -> None:
        """Check a constraint without compiling it. Raises InvalidArgumentError, UnimplementedError."""
        if self._missing is not None:
            raise UnimplementedError(f"{constraint_field(constraint.kind)}: the coordinator {self._missing}")
        if (size := len(constraint.text.encode())) > MAX_BYTES:
            reason = f"has {size} bytes, more than {MAX_BYTES}"
            raise InvalidArgumentError(constraint_field(constraint.kind), reason, limit=MAX_BYTES)

    async def read(self, constraint: Constraint, client: str, before: Check) -> str:
        """Return the grammar of a client's checked constraint. `before` runs right before compilation.

        Raises InvalidArgumentError, QueueFullError, UnavailableError, UnimplementedError, and the errors of `before`.
        """
        key = hashlib.sha256(repr(astuple(constraint)).encode()).digest()
        while (result := self._cached(key)) is None:
            if (done := self._compiling.get((client, key))) is not None:
                await done.wait()
                continue
            done = self._compiling[client, key] = Event()
            try:
                self._keep(key, await self._compile(constraint, client, before))
            finally:
                del self._compiling[client, key]
                done.set()
        if isinstance(result, PromptError):
            raise InvalidArgumentError(constraint_field(constraint.kind), str(result))
        return result

    def _cached(self, key: bytes) -> str | PromptError | None:
        result, expires = self._results.get(key, (None, math.inf))
        if self._clock() >= expires:
            del self._results[key]
            return None
        if result is not None:
            self._results.move_to_end(key)
        return result

    def _keep(self, key: bytes, result: str | PromptError) -> None:
        seconds = LIMIT_SECONDS if isinstance(result, LimitError) else math.inf
        self._results[key] = result, self._clock() + seconds
        if len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)

    async def _compile(self, constraint: Constraint, client: str, before: Check) -> str | PromptError:
        try:
            grammar = await self._pool.compile(client, constraint, before)
        except PromptError as error:
            return error
        if len(grammar) > MAX_GRAMMAR_LENGTH:
            return PromptError(f"its grammar has {len(grammar)} characters, more than {MAX_GRAMMAR_LENGTH}")
        return grammar


def _choices(choices: Sequence[str]) -> list[str]:
    field = f"{constraint_field('choice')}.choices"
    if not 1 <= len(choices) <= MAX_CHOICES:
        refusal = f"has {len(choices)} entries: it must have from 1 to {MAX_CHOICES}"
        raise InvalidArgumentError(field, refusal, limit=MAX_CHOICES if choices else 1)
    seen: set[str] = set()
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidArgumentError(f"{field}[{index}]", "must not be empty")
        if choice in seen:
            raise InvalidArgumentError(f"{field}[{index}]", "repeats an earlier entry")
        seen.add(choice)
    return list(choices)

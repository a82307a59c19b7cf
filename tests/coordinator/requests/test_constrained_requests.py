"""Constrained requests: valid constraints reach the target worker as grammars, invalid ones are refused by name."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode
from serving import RecordingTarget, Serving, make_request, refusal, serving, stream, violated_fields

from coordinator.prompts import constraint_reader
from coordinator.prompts.tokenizer_pool import Constraint, LimitError, PromptError, TimeLimits, TokenizerPool
from specpool.protocol.errors import InvalidArgumentError, QueueFullError
from specpool.v1 import generation_pb2 as pb

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["answer", "count"],
        "additionalProperties": False,
    }
)
CHOICES = pb.ChoiceConstraint(choices=["left", "right", "left or right"])


def constrained(max_tokens: int = 80, k: int | None = None, prompt: Any = (1,), **params: Any) -> pb.GenerateRequest:
    return make_request(prompt, max_tokens, k, **params)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving(RecordingTarget()) as serving_:
        yield serving_
        await serving_.expect(make_request())
        await serving_.until_idle()


ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": SCHEMA}, r'\{"answer":"(yes|no)","count":\d{1,2}\}'),
    "regex": ({"regex": "[ab]{3,5}c?"}, "[ab]{3,5}c?"),
    "lark": ({"grammar": 'start: "x" /[0-9]+/'}, "x[0-9]+"),
    "gbnf": ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    "choice": ({"choice": CHOICES}, "left|right|left or right"),
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_answers_match_the_constraint(served: Serving, case: str) -> None:
    params, pattern = ACCEPTED[case]
    for seed, k in enumerate((0, 3, None, 1)):
        response = await served.stub.Generate(constrained(k=k, prompt=[seed], **params))
        assert response.finish_reason in ("stop", "length")
        if response.finish_reason == "stop":
            assert re.fullmatch(pattern, response.text), response.text
        (sent, *_) = (item.sampling.grammar for request in served.target.requests for item in request.items)
        assert list(response.token_ids) == served.target.continuation([seed], 80, sent)


async def test_constraints_combine_with_other_parameters(served: Serving) -> None:
    params = {"choice": CHOICES, "temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2, "min_tokens": 2}
    response = await served.stub.Generate(constrained(**params, logit_bias={3: 1.0}, presence_penalty=0.5))
    for sample in (response, *response.other_samples):
        assert sample.text in CHOICES.choices
        assert len(sample.logprobs) == len(sample.token_ids)
    _, complete = await stream(served, constrained(choice=CHOICES, stop=["t"]))
    assert complete.text in ("lef", "righ")
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "t")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "broken JSON": ({"json_schema": "{"}, "json_schema", "is not JSON"),
    "no schema": ({"json_schema": ""}, "json_schema", "must not be empty"),
    "unknown type": ({"json_schema": '{"type": "foo"}'}, "json_schema", "does not compile: Invalid type: foo"),
    "open group": ({"regex": "(a"}, "regex", "does not compile: invalid regex: unclosed group"),
    "unknown rule": ({"grammar": "start: foo"}, "grammar", "does not compile"),
    "dead end": ({"grammar": "start: start"}, "grammar", "matches no text"),
    "no format": ({"structural_tag": "{}"}, "structural_tag", "must be"),
    "not an object": ({"json_object": False}, "json_object", "must be true"),
    "large": ({"regex": "a" * 65_537}, "regex", "has 65537 bytes, more than 65536"),
    "no choices": ({"choice": pb.ChoiceConstraint()}, "choice.choices", "has 0 entries"),
    "empty choice": ({"choice": pb.ChoiceConstraint(choices=["a", ""])}, "choice.choices[1]", "must not be empty"),
    "equal choices": ({"choice": pb.ChoiceConstraint(choices=["a", "a"])}, "choice.choices[1]", "repeats"),
    "many choices": (
        {"choice": pb.ChoiceConstraint(choices=map(str, range(1025)))}, "choice.choices", "has 1025 entries",
    ),
    "no JSON": ({"regex": "a", "json_whitespace": True}, "json_whitespace", "must be given with json_schema, json_obj"),
    "no end": ({"regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined with regex"),
}  # fmt: skip


async def test_invalid_constraints_are_refused_by_name(served: Serving) -> None:
    for case, (params, name, reason) in [*REFUSED.items(), *REFUSED.items()]:
        error = await refusal(served.stub.Generate(constrained(**params)))
        assert error.code() is StatusCode.INVALID_ARGUMENT, case
        assert violated_fields(error) == [f"sampling_params.{name}"]
        assert error.details().startswith(f"sampling_params.{name}: {reason}")
        assert len(error.details()) < 400
    assert served.target.requests == []


async def read_pattern(reader: constraint_reader.ConstraintReader, pattern: str) -> str:
    """Return the grammar of a regular expression, or the reason of its refusal."""
    try:
        return await reader.read(Constraint("regex", pattern), "client", mock.Mock())
    except InvalidArgumentError as error:
        return str(error)


async def test_results_are_kept_up_to_a_maximum() -> None:
    compiled: list[str] = []

    async def compile_(client: str, constraint: Constraint, before: Any) -> str:
        compiled.append(constraint.text)
        if constraint.text == "(":
            raise PromptError("is wrong")
        return f"grammar of {constraint.text}"

    reader = constraint_reader.ConstraintReader(mock.Mock(compile=compile_))
    others = [str(number) for number in range(constraint_reader.MAX_RESULTS - 1)]
    for pattern in ("a", "(", "(", "a"):
        expected = "is wrong" if pattern == "(" else f"grammar of {pattern}"
        assert expected in await read_pattern(reader, pattern)
    assert compiled == ["a", "("]
    for pattern in (*others, "a"):  # evicts "(", the least recently used
        await read_pattern(reader, pattern)
    assert compiled == ["a", "(", *others]
    await read_pattern(reader, "(")
    assert compiled == ["a", "(", *others, "("]


async def test_the_same_schema_with_and_without_whitespace_is_compiled_twice() -> None:
    async with serving(RecordingTarget(), with_draft=False) as served:
        for _ in range(2):
            for allowed in (False, True):
                await served.stub.Generate(constrained(json_schema=SCHEMA, json_whitespace=allowed))
        sent = [item.sampling.grammar for request in served.target.requests for item in request.items if item.sampling]
        compact, spaced = dict.fromkeys(filter(None, sent))
        assert '"whitespace_flexible": false' in compact
        assert "whitespace_flexible" not in spaced


async def test_a_constraint_that_takes_too_long_delays_nobody() -> None:
    async with serving(with_draft=False, new_pool=TokenizerPool) as served:
        await served.stub.Generate(constrained(regex="a"))
        pool = served.process.coordinator.tokenizers
        pool.times = TimeLimits(constraint_seconds=0.2)
        hostile = served.stub.Generate(constrained(regex="(a{1000}){1000}"))
        began = time.monotonic()
        await served.expect(make_request())
        assert time.monotonic() - began < 5.0
        with pytest.raises(grpc.aio.AioRpcError, match="compiling it takes more than") as refused:
            await hostile
        assert refused.value.code() is StatusCode.INVALID_ARGUMENT
        pool.times = TimeLimits(constraint_seconds=0.0)  # the refusal is kept
        assert (
            await refusal(served.stub.Generate(constrained(regex="(a{1000}){1000}")))
        ).details() == refused.value.details()


async def test_refusals_by_limits_are_kept_for_a_while() -> None:
    now = 0.0
    outcomes = [PromptError("is wrong"), LimitError("compiling it takes more than 1 s"), "start: /a/"]
    pool = mock.Mock(compile=mock.AsyncMock(side_effect=outcomes))
    reader = constraint_reader.ConstraintReader(pool, lambda: now)
    for _ in range(2):
        assert "is wrong" in await read_pattern(reader, "(")
        assert "takes more than 1 s" in await read_pattern(reader, "a")
        now += constraint_reader.LIMIT_SECONDS - 1
    assert pool.compile.await_count == 2
    assert await read_pattern(reader, "a") == "start: /a/"
    assert "is wrong" in await read_pattern(reader, "(")
    assert pool.compile.await_count == 3


async def test_equal_constraints_of_a_client_share_a_compilation() -> None:
    pool, gate = mock.Mock(), asyncio.Event()
    results = iter([QueueFullError("full", 1.0), "grammar"])

    async def compile_(*_: Any) -> str:
        result = next(results)
        await gate.wait()
        if isinstance(result, Exception):
            raise result
        return result

    pool.compile = mock.Mock(side_effect=compile_)
    reader = constraint_reader.ConstraintReader(pool)
    tasks = [asyncio.create_task(reader.read(Constraint("regex", "a"), "client", mock.Mock())) for _ in range(4)]
    await asyncio.sleep(0)
    assert pool.compile.call_count == 1
    tasks[3].cancel()
    gate.set()
    failed, *shared, cancelled = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, QueueFullError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert shared == ["grammar", "grammar"]
    assert pool.compile.call_count == 2
    assert reader._compiling == {}


async def test_processes_without_llguidance_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(RecordingTarget(supports_grammars=False), with_draft=False) as served:
        error = await refusal(served.stub.Generate(constrained(regex="a")))
        assert error.code() is StatusCode.UNIMPLEMENTED
        assert error.details().startswith(f"sampling_params.regex: the target worker at {served.target_address} needs ")
        await served.expect(make_request())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with serving(RecordingTarget(), with_draft=False) as served:
        error = await refusal(served.stub.Generate(constrained(regex="a")))
        assert error.code() is StatusCode.UNIMPLEMENTED
        assert error.details().startswith("sampling_params.regex: the coordinator needs llguidance: ")

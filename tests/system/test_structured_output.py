"""Constrained answers are the same with every draft, in any batch and after lost caches, and they are valid."""

import asyncio
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import make_prompt
from pair_service import ARRANGEMENTS, LogitsTap, PairService, running_arrangement

from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
DATE = "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SUM = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'
COLORS = ("red", "green", "grey goose")
TAGS = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer", "maximum": 9, "minimum": 0}, "end": "</f>"}],
    "triggers": ["<f"],
}


@dataclass(frozen=True)
class Constraint:
    """A field of `SamplingParams`, and the check of a complete answer."""

    field: str
    value: Any
    holds: Callable[[str], object]

    @property
    def params(self) -> dict[str, Any]:
        return {self.field: self.value}


def is_compact_person(text: str) -> bool:
    person = json.loads(text)
    jsonschema.validate(person, PERSON)
    return text == json.dumps(person, separators=(",", ":"))


CONSTRAINTS = [
    Constraint("json_schema", json.dumps(PERSON), is_compact_person),
    Constraint("json_object", True, lambda text: isinstance(json.loads(text), dict)),
    Constraint("regex", DATE, lambda text: re.fullmatch(DATE, text)),
    Constraint("grammar", SUM, lambda text: re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2})*", text)),
    Constraint("grammar", 'root ::= "a" ("b" | "c")+ "d"', lambda text: re.fullmatch("a[bc]+d", text)),
    Constraint("choice", pb.ChoiceConstraint(choices=COLORS), COLORS.__contains__),
    Constraint("structural_tag", json.dumps(TAGS), lambda text: re.fullmatch("(?s:[^<]|<(?!f)|<f>[0-9]</f>)*", text)),
]
Request = tuple[Constraint | None, dict[str, Any], tuple[int, ...], int | None, Any]

requests = st.tuples(
    st.sampled_from([*CONSTRAINTS, *CONSTRAINTS, None]),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.0, 1.0, 2.0]),
            "top_p": st.sampled_from([1.0, 0.9]),
            "repetition_penalty": st.sampled_from([1.0, 1.2]),
            "min_tokens": st.sampled_from([0, 0, 12]),
            "logprobs": st.sampled_from([None, 2]),
            "stop": st.sampled_from([(), ("e",)]),
            "seed": st.integers(0, 2**64 - 1),
        }
    ),
    st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 16])).map(make_prompt),
    st.sampled_from([None, None, *range(9)]),
    st.sampled_from([pb.DRAFT_METHOD_MODEL, pb.DRAFT_METHOD_NGRAM, pb.DRAFT_METHOD_BEST]),
)


def make(request: Request, k: int | None) -> pb.GenerateRequest:
    constraint, sampling, prompt, _, method = request
    params = pb.SamplingParams(max_tokens=MAX_TOKENS, **sampling, **(constraint.params if constraint else {}))
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=params,
        speculative=pb.SpeculativeParams(num_speculative_tokens=k, method=method),
    )


def outcome(response: pb.GenerateResponse) -> tuple[object, ...]:
    """The parts of a response that must not depend on drafts, batches or faults."""
    return (
        list(response.token_ids), response.text, response.finish_reason,
        response.matched_token_id, response.matched_stop_str,
        [entry.SerializeToString() for entry in response.logprobs],
    )  # fmt: skip


class Service:
    """A service, and the plain answers of requests alone."""

    def __init__(self, runner: asyncio.Runner, pair: PairService, tap: LogitsTap) -> None:
        self.runner, self.pair, self.tap = runner, pair, tap

    async def check(self, mix: list[Request], forget_after: list[int]) -> None:
        """Assert that a mix of requests gets the plain answers, while workers lose their caches."""
        stub, expected = self.pair.client.stub, []
        for request in mix:
            await self.pair.wait_idle()
            expected.append(outcome(await stub.Generate(make(request, 0))))
        forgetting = asyncio.create_task(self.pair.forget_after(forget_after))
        answers = await asyncio.gather(*(stub.Generate(make(request, request[3])) for request in mix))
        await forgetting
        for request, answer, plain in zip(mix, answers, expected, strict=True):
            assert outcome(answer) == plain
            constraint = request[0]
            if constraint is not None and answer.token_ids[-1] == EOS_TOKEN_ID:
                assert answer.finish_reason == "stop"
                assert constraint.holds(answer.text), answer.text
        assert not self.tap.different


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def service(tiny_pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Service]:
    options = {"max_num_seqs": 5, "max_batch_size": 4, "overlap": "on"}
    worker = {"max_sequences": 5}
    with running_arrangement(request.param, *tiny_pair, worker=worker, **options) as (runner, pair):
        yield Service(runner, pair, LogitsTap(pair.target.backend.engine))


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(requests, min_size=1, max_size=6), forget_after=st.lists(st.integers(1, 8), max_size=2))
def test_constrained_answers_equal_plain_decoding(
    service: Service, mix: list[Request], forget_after: list[int]
) -> None:
    service.runner.run(service.check(mix, forget_after))


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: each.field)
def test_every_draft_length_gives_the_plain_answer(service: Service, constraint: Constraint) -> None:
    sampling = {"temperature": 0.0, "logprobs": 1, "seed": 1}
    mix: list[Request] = [
        (constraint, sampling, make_prompt((1, 9)), k, pb.DRAFT_METHOD_MODEL) for k in (1, 2, 8, None)
    ]
    service.runner.run(service.check(mix, []))


def test_the_grammar_drafts_by_itself(service: Service) -> None:
    async def ask(k: int | None) -> tuple[pb.GenerateResponse, int]:
        request: Request = (CONSTRAINTS[0], {"seed": 3}, make_prompt((2, 7)), k, pb.DRAFT_METHOD_NGRAM)
        stub = service.pair.client.stub
        answer = await stub.Generate(make(request, k))
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        return answer, info.counters.drafts["grammar"].accepted_draft_tokens

    plain, before = service.runner.run(ask(0))
    assert not plain.speculative_decoding.num_draft_tokens
    answer, after = service.runner.run(ask(None))
    assert answer.speculative_decoding.num_accepted_draft_tokens >= len('{"name":"')
    assert after - before >= len('{"name":"')
    assert answer.text == plain.text


def test_streamed_pieces_are_valid_beginnings(service: Service) -> None:
    async def pieces() -> list[str]:
        request: Request = (CONSTRAINTS[0], {"temperature": 1.0, "seed": 5}, make_prompt((1, 5)), None, 0)
        texts = [""]
        async for message in service.pair.client.stub.GenerateStream(make(request, None)):
            if message.HasField("chunk"):
                texts.append(texts[-1] + message.chunk.text)
        return texts

    begin = '{"name":"'
    for text in service.runner.run(pieces()):
        assert text.startswith(begin) or begin.startswith(text)


# --- Fuzzing


def fuzzed(pick: random.Random) -> dict[str, Any]:
    """A constraint that may be invalid, hostile or fine."""
    kind = pick.choice(["json_schema", "regex", "grammar", "choice", "structural_tag"])
    if kind == "choice":
        return {
            kind: pb.ChoiceConstraint(
                choices=["".join(pick.choices(string.printable, k=pick.randrange(6))) for _ in range(pick.randrange(4))]
            )
        }
    if kind == "json_schema":
        text = json.dumps(fuzzed_schema(pick, pick.randrange(5)))
    elif kind == "regex":
        text = "".join(
            pick.choices(
                ["a", "[b-d]", "(", ")", "|", "*", "{2,3}", "{900}", "\\d", ".", "^", "$", "(?i)", "é"],
                k=pick.randrange(1, 9),
            )
        )
    elif kind == "grammar":
        text = (
            "start: "
            + " ".join(
                pick.choices(
                    ['"a"', "start", "B", "|", "*", "(", ")", "?", "/[0-9]/", "%json {}"], k=pick.randrange(1, 9)
                )
            )
            + "\nB: /b/"
        )
    else:
        text = json.dumps(
            {
                "structures": [{"begin": pick.choice(["<a>", ""]), "schema": fuzzed_schema(pick, 1), "end": "x"}],
                "triggers": [pick.choice(["<", "y"])],
            }
        )
    if pick.random() < 0.1:
        place = pick.randrange(len(text))
        text = text[:place] + pick.choice(string.printable) + text[place + 1 :]
    return {kind: text}


def fuzzed_schema(pick: random.Random, depth: int) -> Any:
    """A random schema."""
    simple: list[Any] = [
        {"type": "integer", "minimum": pick.randrange(-9, 9)}, {"type": "string", "maxLength": pick.randrange(5)},
        {"enum": [None, 1, "x"]}, {"const": [1]}, {"type": "boolean"}, {"type": "what"}, {"pattern": "["},
        True, False, {}, {"$ref": "#/nowhere"}, {"minLength": 10**9},
        {"type": "number", "multipleOf": 0.01},
    ]  # fmt: skip
    if not depth:
        return pick.choice(simple)
    inner = [fuzzed_schema(pick, depth - 1) for _ in range(pick.randrange(1, 3))]
    return pick.choice(
        [
            {"type": "object", "properties": {f"k{i}": each for i, each in enumerate(inner)}, "required": ["k0"]},
            {"type": "array", "items": inner[0], "minItems": pick.randrange(3), "maxItems": 3},
            {"anyOf": inner}, {"allOf": inner}, {"oneOf": inner}, {"not": inner[0]},
        ]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_fuzzed_constraints_are_refused_or_followed(service: Service, seed: int) -> None:
    """Send 500 constraints in all, beside another client whose answers stay complete."""

    async def one(number: int) -> bool:
        pick = random.Random(1000 * seed + number)
        constraint = fuzzed(pick)
        params = pb.SamplingParams(max_tokens=24, temperature=pick.choice([0.0, 1.0]), seed=number, **constraint)
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=make_prompt((number % 3, 5))), sampling_params=params
        )
        try:
            answer = await service.pair.client.stub.Generate(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            refused = error.code() == grpc.StatusCode.INVALID_ARGUMENT and "sampling_params." in (error.details() or "")
            return False if refused else pytest.fail(f"{constraint}: {error}")
        if answer.finish_reason == "stop" and "json_schema" in constraint:
            schema = json.loads(constraint["json_schema"])
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
        return True

    async def several() -> list[bool]:
        return [await one(number) for number in range(250 * seed, 250 * seed + 250)]

    followed = service.runner.run(several())
    assert 25 < sum(followed) < 225

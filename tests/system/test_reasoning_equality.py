"""Answers with limits on reasoning are the same with any draft, in any batch, and after lost caches."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import make_prompt
from pair_service import ARRANGEMENTS, LogitsTap, PairService, running_arrangement

from specpool.testing import EOS_TOKEN_ID, byte_tokenizer
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 40
BEGIN, END = "<<", "</"
OPEN, CLOSE = (byte_tokenizer().token_to_id(character) for character in "</")
DATE = "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
JSON = '{"type": "object", "properties": {"likes": {"enum": ["tea", "coffee"]}}, "required": ["likes"]}'
CONSTRAINTS: list[dict[str, str]] = [{}, {"regex": DATE}, {"json_schema": JSON}]

requests = st.builds(
    lambda constraint, after, prompt, inside, limit, tags, k, method, **sampling: pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[*prompt, *[OPEN] * (2 * inside)]),
        sampling_params=pb.SamplingParams(
            max_tokens=MAX_TOKENS,
            constraint_after_reasoning=bool(constraint) and after,
            max_thinking_tokens=None if constraint and not after else limit,
            logit_bias={OPEN: 7.0, CLOSE: 5.0} if tags else {},
            **constraint,
            **sampling,
        ),
        speculative=pb.SpeculativeParams(num_speculative_tokens=k, method=method),
    ),
    constraint=st.sampled_from(CONSTRAINTS),
    after=st.sampled_from([True, True, False]),
    prompt=st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 16])).map(make_prompt),
    inside=st.booleans(),
    limit=st.sampled_from([None, 0, 1, 2, 9]),
    tags=st.booleans(),
    k=st.sampled_from([None, None, *range(9)]),
    method=st.sampled_from([pb.DRAFT_METHOD_MODEL, pb.DRAFT_METHOD_NGRAM, pb.DRAFT_METHOD_BEST]),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    logprobs=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**64 - 1),
)


def outcome(response: pb.GenerateResponse) -> tuple[object, ...]:
    """The parts of a response that must not depend on drafts, batches or faults."""
    logprobs = [entry.SerializeToString() for entry in response.logprobs]
    return [*response.token_ids], response.text, response.finish_reason, logprobs


def assert_limits(params: pb.SamplingParams, response: pb.GenerateResponse) -> None:
    """Assert that an answer respects the limit, and its constraint after the block."""
    token_ids, maximum = [*response.token_ids], MAX_TOKENS
    if params.HasField("max_thinking_tokens"):
        maximum = params.max_thinking_tokens
    has_block = response.starts_in_reasoning or token_ids[:2] == [OPEN, OPEN]
    answer = token_ids
    if has_block:
        block = token_ids if response.starts_in_reasoning else token_ids[2:]
        ends = [i for i, pair in enumerate(pairwise(block)) if pair == (OPEN, CLOSE)]
        assert min([*ends, len(block) - 1]) <= maximum
        answer = block[ends[0] + 2 :] if ends else []
    elif maximum == 0:
        assert token_ids[:2] != [OPEN, OPEN]
    if params.constraint_after_reasoning and response.finish_reason == "stop":
        assert answer[-1] == EOS_TOKEN_ID
        text = byte_tokenizer().decode(answer[:-1])
        assert json.loads(text)["likes"] if params.json_schema else re.fullmatch(DATE, text)


class Service:
    """A service, and the plain answers to requests sent one at a time."""

    def __init__(self, runner: asyncio.Runner, pair: PairService, tap: LogitsTap) -> None:
        self.runner, self.pair, self.tap = runner, pair, tap

    async def check(self, mix: list[pb.GenerateRequest], forget_after: list[int]) -> None:
        """Assert that a mix of requests gets the plain answers, while workers lose their caches."""
        stub, expected = self.pair.client.stub, []
        for request in mix:
            await self.pair.wait_idle()
            plain = pb.GenerateRequest()
            plain.CopyFrom(request)
            plain.speculative.num_speculative_tokens = 0
            expected.append(await stub.Generate(plain))
        forgetting = asyncio.create_task(self.pair.forget_after(forget_after))
        answers = await asyncio.gather(*map(stub.Generate, mix))
        await forgetting
        for request, answer, truth in zip(mix, answers, expected, strict=True):
            assert outcome(answer) == outcome(truth)
            assert_limits(request.sampling_params, answer)
        assert not self.tap.different


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def service(tiny_pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Service]:
    options = {"max_num_seqs": 5, "max_batch_size": 4, "overlap": "on", "reasoning_tags": f"{BEGIN},{END}"}
    worker = {"max_sequences": 5}
    with running_arrangement(request.param, *tiny_pair, worker=worker, **options) as (runner, pair):
        yield Service(runner, pair, LogitsTap(pair.target.backend.engine))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(requests, min_size=1, max_size=7), forget_after=st.lists(st.integers(1, 8), max_size=2))
def test_limited_answers_equal_plain_decoding(
    service: Service, mix: list[pb.GenerateRequest], forget_after: list[int]
) -> None:
    service.runner.run(service.check(mix, forget_after))

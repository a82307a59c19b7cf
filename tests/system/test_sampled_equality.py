"""A seeded request gives the same tokens, text, stop and log-probabilities in any batch, with any draft length."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import make_prompt
from pair_service import ARRANGEMENTS, PairService, running_arrangement, serving_pair

from specpool.drafting.acceptance import FIRST_RATE
from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 20

params = st.builds(
    pb.SamplingParams,
    temperature=st.sampled_from([None, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([None, 0.5, 0.95]),
    top_k=st.sampled_from([None, 1, 5, 40]),
    min_p=st.sampled_from([None, 0.1]),
    repetition_penalty=st.sampled_from([None, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([None, 0.7, -0.4]),
    presence_penalty=st.sampled_from([None, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {5: 8.0, EOS_TOKEN_ID: 6.0}]),
    max_tokens=st.integers(1, MAX_TOKENS),
    stop_token_ids=st.sampled_from([[], [3, 200]]),
    ignore_eos=st.booleans(),
    stop=st.lists(st.sampled_from(["a", "e", "\u0120", "th", "\ufffd"]), max_size=2),
    logprobs=st.sampled_from([None, None, 0, 3]),
    seed=st.integers(0, 2**64 - 1),
)
prompts = st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 16, 40])).map(make_prompt)


def make(prompt: tuple[int, ...], sampling: pb.SamplingParams, k: int | None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=sampling,
        speculative=pb.SpeculativeParams(num_speculative_tokens=k),
    )


def outcome(response: pb.GenerateResponse) -> tuple[object, ...]:
    """Everything in a response that must not depend on the batch."""
    return (
        list(response.token_ids),
        response.text,
        response.finish_reason,
        response.matched_token_id,
        response.matched_stop_str,
        response.seed,
        [found.SerializeToString(deterministic=True) for found in response.logprobs],
        response.usage.completion_tokens,
    )


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def pair(tiny_pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, PairService]]:
    options = {"max_num_seqs": 6, "max_batch_size": 4, "overlap": "on"}
    worker = {"max_sequences": 6}
    with running_arrangement(request.param, *tiny_pair, worker=worker, **options) as (runner, service):
        yield runner, service
        if request.param == "branches":
            assert service.process.coordinator.lanes.first.drafting.lengths.branching.coverage(1) != FIRST_RATE, (
                "no branches were drafted"
            )


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.lists(st.tuples(prompts, params, st.one_of(st.none(), st.integers(1, 8))), min_size=1, max_size=7),
    greedy=st.integers(0, 2),
)
def test_samples_do_not_depend_on_speculation_or_batch(
    pair: tuple[asyncio.Runner, PairService],
    mix: list[tuple[tuple[int, ...], pb.SamplingParams, int | None]],
    greedy: int,
) -> None:
    runner, service = pair

    async def check() -> None:
        generate = service.client.stub.Generate
        alone = [outcome(await generate(make(prompt, sampling, 0))) for prompt, sampling, _ in mix]
        neighbours = [make(make_prompt((i, 30)), pb.SamplingParams(max_tokens=MAX_TOKENS), 4) for i in range(greedy)]
        requests = [make(*one) for one in mix] + neighbours
        together = await asyncio.gather(*(generate(request) for request in requests))
        assert [outcome(response) for response in together[: len(mix)]] == alone
        for (_, sampling, _), response in zip(mix, together, strict=False):
            check_logprobs(sampling, response)

    runner.run(check())


def check_logprobs(sampling: pb.SamplingParams, response: pb.GenerateResponse) -> None:
    """Asserts sorted log-probabilities that agree about the chosen token."""
    if not sampling.HasField("logprobs"):
        assert not response.logprobs
        return
    assert len(response.logprobs) == len(response.token_ids)
    for token, found in zip(response.token_ids, response.logprobs, strict=True):
        assert len(found.top_token_ids) == len(found.top_logprobs) == sampling.logprobs
        assert list(found.top_logprobs) == sorted(found.top_logprobs, reverse=True)
        assert found.logprob <= 0
        if token in found.top_token_ids:
            assert found.logprob == found.top_logprobs[list(found.top_token_ids).index(token)]


@pytest.mark.parametrize("is_carried", [False, True])
async def test_sampled_drafts_are_accepted(tiny_pair: tuple[Path, Path], is_carried: bool) -> None:
    """Both models share their noise, so acceptance at temperature 1 far exceeds that of independent samples. A lost
    cache does not lose the sampling rules."""
    target, draft = tiny_pair
    carried = {"draft": str(draft)} if is_carried else {}
    async with serving_pair(target, None if is_carried else draft, target_worker=carried) as service:
        chance = random.Random(0)
        for forget in (False, True):
            rates, truth = [], []
            for _ in range(4):
                sampling = pb.SamplingParams(
                    temperature=1.0, max_tokens=40, ignore_eos=True, seed=chance.getrandbits(64)
                )
                request = make(make_prompt((1, 16)), sampling, 4)
                task = asyncio.ensure_future(generate(service, request))
                if forget:
                    await service.forget_after([2])
                response = await task
                rates.append(response.speculative_decoding.draft_acceptance_rate)
                truth.append(list(response.token_ids))
                plain = await service.client.stub.Generate(make(make_prompt((1, 16)), sampling, 0))
                assert list(plain.token_ids) == truth[-1]
            assert sum(rates) / len(rates) > 0.3


async def generate(service: PairService, request: pb.GenerateRequest) -> pb.GenerateResponse:
    return await service.client.stub.Generate(request)

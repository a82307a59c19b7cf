"""Prefix caching prefills common prefixes once, and changes no token and no bit of a logit."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from delta_nets import save_delta_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import make_prompt
from pair_service import LogitsTap, PairService, running_pair, serving_coordinator, serving_pair
from worker_service import PATIENCE_SECONDS, until

from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 12
SLOTS = 6

# Prompts combine a few parts, so many share a prefix.
PARTS = [make_prompt((seed, length)) for seed, length in ((0, 40), (1, 17), (2, 3), (3, 70), (4, 1))]
prompts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(lambda parts: sum(parts, ()))


@dataclass(frozen=True)
class Asked:
    """One request of a mix."""

    prompt: tuple[int, ...]
    k: int
    temperature: float
    n: int
    starts_after: int  # hundredths of a second

    def message(self, k: int, n: int, seed: int = 7) -> pb.GenerateRequest:
        params = pb.SamplingParams(temperature=self.temperature, max_tokens=MAX_TOKENS, n=n, seed=seed, logprobs=1)
        return pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=self.prompt),
            sampling_params=params,
            speculative=pb.SpeculativeParams(num_speculative_tokens=k),
        )


asked = st.builds(
    Asked,
    prompt=prompts,
    k=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0]),
    n=st.sampled_from([1, 1, 2, 4]),
    starts_after=st.integers(0, 6),
)


@dataclass
class Both:
    """Two coordinators of the same workers, with and without prefix caching."""

    runner: asyncio.Runner
    service: PairService
    plain: AsyncClient
    tap: LogitsTap


@pytest.fixture(scope="module")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_delta_net(tmp_path_factory.mktemp("recurrent"))


KINDS = ["slots", "recurrent", pytest.param("padded", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], recurrent_model: Path) -> Iterator[Both]:
    worker = {"max_sequences": SLOTS, "kv_layout": "padded" if request.param == "padded" else "slots"}
    pair = (recurrent_model, recurrent_model) if request.param == "recurrent" else tiny_pair
    with running_pair(*pair, worker=worker, max_num_seqs=SLOTS - 1, prefill_tokens=32) as (runner, service):
        target, draft = service.process.coordinator.target, service.draft_link
        plain_context = serving_coordinator(target.address, draft.address, max_num_seqs=1, prefix_caching=False)
        plain, _ = runner.run(plain_context.__aenter__())
        yield Both(runner, service, plain, LogitsTap(service.target.backend.engine))
        runner.run(plain_context.__aexit__(None, None, None))


def outcome(response: pb.GenerateResponse) -> tuple[object, ...]:
    return list(response.token_ids), response.seed, [found.SerializeToString() for found in response.logprobs]


def samples(response: pb.GenerateResponse) -> list[pb.GenerateResponse]:
    return [response, *response.other_samples]


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(asked, min_size=1, max_size=7), forget=st.booleans())
def test_cached_prefixes_change_no_token_and_no_logit(both: Both, mix: list[Asked], forget: bool) -> None:
    async def play(one: Asked) -> pb.GenerateResponse:
        await asyncio.sleep(one.starts_after / 100)
        return await both.service.client.stub.Generate(one.message(one.k, one.n if one.temperature else 1))

    async def check() -> None:
        playing = asyncio.gather(*map(play, mix))
        if forget:
            await asyncio.sleep(0.05)
            await both.service.forget(both.service.target)
        for one, response in zip(mix, await playing, strict=True):
            for index, sample in enumerate(samples(response)):
                assert (sample.index, sample.seed) == (index, 7 + index)
                assert sample.usage.cached_tokens < sample.usage.prompt_tokens == len(one.prompt)
                alone = await both.plain.stub.Generate(one.message(0, 1, sample.seed))
                assert alone.usage.cached_tokens == 0
                assert outcome(sample) == outcome(alone)

    both.runner.run(check())
    assert both.tap.compared > 0
    assert both.tap.different == []


async def test_usage_reports_cached_tokens(tiny_pair: tuple[Path, Path]) -> None:
    async with serving_pair(*tiny_pair) as service:

        async def cached(prompt: tuple[int, ...], n: int = 1) -> list[int]:
            response = await service.client.generate(prompt, max_tokens=8, n=n, temperature=1.0, ignore_eos=True)
            history.append((*prompt, *response.token_ids))
            return [sample.usage.cached_tokens for sample in samples(response)]

        history: list[tuple[int, ...]] = []
        prompt, other = make_prompt((0, 50)), make_prompt((1, 50))
        assert await cached(prompt) == [0]
        assert await cached(prompt) == [32]  # whole pages
        assert await cached(other) == [0]
        assert await cached((*prompt[:33], *other)) == [32]
        assert await cached((*history[1], 5, 6)) == [32]  # next turn
        assert await cached(make_prompt((2, 40)), n=3) == [0, 32, 32]
        assert await cached(make_prompt((3, 16)), n=2) == [0, 0]  # the last token runs in any case
        info = await service.client.server_info()
        assert info.counters.cached_tokens == 5 * 32
        assert info.counters.prompt_tokens == 50 * 3 + 83 + 60 + 120 + 32
        assert info.counters.cache_misses == 0


async def test_recurrent_models_reuse_prompts_and_common_beginnings(recurrent_model: Path) -> None:
    async with serving_pair(recurrent_model, None, prefill_tokens=64) as service:

        async def cached(*prompts: tuple[int, ...], n: int = 1) -> list[int]:
            asking = (service.client.generate(each, max_tokens=8, n=n, temperature=1.0) for each in prompts)
            responses = await asyncio.gather(*asking)
            answers.extend((*prompt, *each.token_ids) for prompt, each in zip(prompts, responses, strict=True))
            return sorted(sample.usage.cached_tokens for response in responses for sample in samples(response))

        answers: list[tuple[int, ...]] = []
        system, other = make_prompt((0, 70)), make_prompt((1, 70))
        for expected in (0, 0, 64, 64):  # the second prompt leaves the states where it differs
            assert await cached((*system, *make_prompt((expected + len(answers), 60)))) == [expected]
        assert await cached((*answers[3], 5, 6)) == [128]  # next turn
        assert await cached(make_prompt((9, 64)), n=3) == [0, 32, 32]
        await service.wait_idle()
        window, all_entered = service.process.coordinator.lanes.first.window, Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.target.run(lambda backend: all_entered.wait(PATIENCE_SECONDS)))
            together = tasks.create_task(cached(*((*other, *make_prompt((i, 40))) for i in range(2, 7))))
            await until(lambda: window.occupied == 5)
            all_entered.set()
        assert together.result() == [0, 0, 64, 64, 64]
        assert (await service.client.server_info()).counters.cache_misses == 0


async def test_concurrent_requests_prefill_a_shared_prompt_once(tiny_pair: tuple[Path, Path]) -> None:
    async with serving_pair(*tiny_pair, prefill_tokens=16) as service:
        system = make_prompt((0, 100))
        asking = [service.client.generate((*system, *make_prompt((i, 5))), max_tokens=4) for i in range(1, 6)]
        cached = [response.usage.cached_tokens for response in await asyncio.gather(*asking)]
        assert sorted(cached) == [0, 96, 96, 96, 96]


@pytest.mark.parametrize(("slots", "window"), [(1, 1), (6, 3)])
async def test_more_samples_than_slots_share_the_prompt(tiny_pair: tuple[Path, Path], slots: int, window: int) -> None:
    async with serving_pair(*tiny_pair, worker={"max_sequences": slots}, max_num_seqs=window) as service:
        response = await service.client.generate(make_prompt((0, 100)), max_tokens=6, temperature=1.0, n=9)
        assert [sample.usage.cached_tokens for sample in samples(response)] == [0, *[96] * 8]


async def test_lost_prefix_is_prefilled_again(tiny_pair: tuple[Path, Path]) -> None:
    """Another coordinator's sequences may take the pages of a cached prefix."""
    async with serving_pair(*tiny_pair, worker={"max_sequences": 2}, max_num_seqs=1) as service:
        prompt = make_prompt((0, 50))
        first = await service.client.generate(prompt, max_tokens=8)
        assert service.draft is not None
        for host in (service.target, service.draft):
            await service.forget(host)
        again = await service.client.generate(prompt, max_tokens=8)
        assert list(again.token_ids) == list(first.token_ids)
        assert again.usage.cached_tokens == 0
        assert (await service.client.server_info()).counters.cache_misses == 0

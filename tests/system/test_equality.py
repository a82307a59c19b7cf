"""Under any load and with lost caches, token ids equal plain decoding, with bit-identical logits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delta_nets import save_delta_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import MAX_TOKENS, Case, assert_equal, cases, make_prompt, make_request, play
from pair_service import ARRANGEMENTS, LogitsTap, PairService, running_arrangement
from tiny_models import noisy_copy, save_model, small_config

from specpool.v1 import generation_pb2 as pb
from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

pytestmark = [pytest.mark.cpus, pytest.mark.thorough]


class Mixes:
    """A service that runs mixes of requests, and the plain tokens of every prompt alone."""

    def __init__(self, runner: asyncio.Runner, service: PairService, tap: LogitsTap) -> None:
        self.runner, self.service, self.tap = runner, service, tap
        self._plain: dict[tuple[tuple[int, ...], bool], list[int]] = {}

    @property
    def cache_misses(self) -> int:
        return self.runner.run(self.service.client.server_info()).counters.cache_misses

    async def plain(self, case: Case) -> list[int]:
        """Tokens of plain decoding with no other request in the service."""
        key = (case.prompt, case.ignore_eos)
        if key not in self._plain:
            await self.service.wait_idle()
            alone = make_request(Case(case.prompt, MAX_TOKENS, 0, case.ignore_eos, 0, None))
            self._plain[key] = list((await self.service.client.stub.Generate(alone)).token_ids)
        return self._plain[key][: case.max_tokens]

    async def check(self, mix: list[Case], forget_after: list[int]) -> None:
        """Run a mix while workers lose their caches, and assert plain tokens."""
        expected = [await self.plain(case) for case in mix]
        forgetting = asyncio.create_task(self.service.forget_after(forget_after))
        plays = (play(self.service.client, case, answer) for case, answer in zip(mix, expected, strict=True))
        got = await asyncio.gather(*plays)
        await forgetting
        assert_equal(mix, got, expected)
        await self.service.wait_idle()


@pytest.fixture(scope="module")
def recurrent_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with recurrent layers."""
    folder = tmp_path_factory.mktemp("recurrent")
    target = save_delta_net(folder / "target")
    return target, noisy_copy(target, folder / "draft", noise=0.001)


KINDS = [
    *(pytest.param(("tiny_pair", arrangement), id=arrangement) for arrangement in ARRANGEMENTS),
    *(
        pytest.param(
            ("recurrent_pair", arrangement),
            id=f"recurrent {arrangement}",
            marks=[] if arrangement == "carried draft" else pytest.mark.slow,
        )
        for arrangement in ARRANGEMENTS
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def mixes(request: pytest.FixtureRequest) -> Iterator[Mixes]:
    """A service with a window, batches and chunks too small for the mixes."""
    pair, arrangement = request.param
    worker = {"max_sequences": 5, "max_num_batched_tokens": 48}
    options = {"max_num_seqs": 5, "max_batch_size": 4, "prefill_tokens": 16, "overlap": "on"}
    models = request.getfixturevalue(pair)
    with running_arrangement(arrangement, *models, worker=worker, **options) as (runner, service):
        yield Mixes(runner, service, LogitsTap(service.target.backend.engine))


def test_both_pairs_accept_and_reject_drafts(mixes: Mixes) -> None:
    client = mixes.service.client

    async def ask() -> list[pb.GenerateResponse]:
        cases = [Case(make_prompt((seed, 20)), MAX_TOKENS, 4, True, 0, None) for seed in range(4)]
        return [await client.stub.Generate(make_request(case)) for case in cases]

    found = [response.speculative_decoding for response in mixes.runner.run(ask())]
    drafted = sum(each.num_draft_tokens for each in found)
    accepted = sum(each.num_draft_tokens * each.draft_acceptance_rate for each in found)
    assert 0.05 < accepted / drafted < 0.95
    assert mixes.runner.run(client.model_info()).target.equivalence == EQUIVALENCE_BITWISE


def test_tokens_of_predictions_are_accepted_and_rejected(mixes: Mixes) -> None:
    async def ask() -> pb.Usage:
        case = Case(make_prompt((0, 20)), MAX_TOKENS, 4, True, 0, None, edits=3)
        request = make_request(case, await mixes.plain(case))
        return (await mixes.service.client.stub.Generate(request)).usage

    usage = mixes.runner.run(ask())
    assert min(usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) > 0


@settings(max_examples=7, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.lists(cases, min_size=1, max_size=9),
    forget_after=st.lists(st.integers(1, 8), max_size=2),
)
def test_tokens_and_logits_equal_plain_decoding(mixes: Mixes, mix: list[Case], forget_after: list[int]) -> None:
    mixes.runner.run(mixes.check(mix, forget_after))
    assert not mixes.tap.different


def test_verified_logits_were_compared(mixes: Mixes) -> None:
    """The property above is not vacuous: contexts do recur."""
    mix = [Case(make_prompt((seed, 20)), MAX_TOKENS, k, True, 0, None) for seed in range(2) for k in (0, 3, 8)]
    before, misses = mixes.tap.compared, mixes.cache_misses
    mixes.runner.run(mixes.check(mix, []))
    assert mixes.tap.compared - before > 5 * MAX_TOKENS
    assert not mixes.tap.different
    assert mixes.cache_misses == misses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("granite_swa", {}),
        ("mistral", {}),
    ],
)
def test_windows_equal_plain_decoding(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Sequences are longer than the window. The draft is a noisy copy of the target."""
    target = save_model(tmp_path / "target", small_config(family, sliding_window=16, **changes))
    draft = noisy_copy(target, tmp_path / "draft", noise=0.01)
    mix = [Case(make_prompt((seed, 20)), MAX_TOKENS, 4, True, 0, None) for seed in range(6)]
    options = {"max_num_seqs": 5, "max_batch_size": 4, "prefill_tokens": 16}
    with running_arrangement("chosen drafts", target, draft, **options) as (runner, service):
        mixes = Mixes(runner, service, LogitsTap(service.target.backend.engine))
        runner.run(mixes.check(mix, [3]))
        assert mixes.tap.compared > 2 * MAX_TOKENS
        assert not mixes.tap.different
        response = runner.run(_generate(service, mix[0]))
        assert 0 < response.speculative_decoding.draft_acceptance_rate < 1


async def _generate(service: PairService, case: Case) -> pb.GenerateResponse:
    return await service.client.stub.Generate(make_request(case))

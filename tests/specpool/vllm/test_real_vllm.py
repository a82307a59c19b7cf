"""`RemoteDraft` in vLLM on the CPU gives the answers of plain vLLM. Only `make test-vllm` runs these tests."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from other_tokenizers import permute_vocabulary

from benchmarks.prompts import load_prompts, token_ids
from benchmarks.vllm_process import DraftProcess, VllmEngine, draft_process
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy

pytestmark = pytest.mark.vllm

PROMPTS, TOKENS = 16, 48
# Enough tokens for a second block of vLLM's KV cache.
MANY_TOKENS, LONG_ROWS = 112, 8
# Compiling the model takes minutes, and is irrelevant here.
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return token_ids(float32_copy(), load_prompts(None, PROMPTS))


@pytest.fixture(scope="module")
def plain_long(prompts: list[list[int]]) -> list[list[int]]:
    with VllmEngine(float32_copy(), "plain", **EAGER) as engine:
        answers: list[list[int]] = engine.wait_ready().run(prompts, MANY_TOKENS)["outputs"]
    return answers


@pytest.fixture(scope="module")
def plain(plain_long: list[list[int]]) -> list[list[int]]:
    return [answer[:TOKENS] for answer in plain_long]


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    with draft_process(embedded_pair().target) as process:
        yield process


@pytest.fixture(scope="module")
def engine(draft: DraftProcess) -> Iterator[VllmEngine]:
    with VllmEngine(float32_copy(), "remote", draft.address, **EAGER) as remote:
        yield remote.wait_ready()


def equal(answers: list[list[int]], truth: list[list[int]]) -> list[bool]:
    return [one == other for one, other in zip(answers, truth, strict=True)]


def test_answers_equal_plain_vllm(engine: VllmEngine, prompts: list[list[int]], plain: list[list[int]]) -> None:
    done = engine.run(prompts, TOKENS)
    assert all(equal(done["outputs"], plain))
    assert done["accepted"] > 0


def test_a_draft_with_another_tokenizer(prompts: list[list[int]], plain: list[list[int]], tmp_path: Path) -> None:
    with (
        draft_process(permute_vocabulary(float32_copy(), tmp_path / "draft")) as other,
        VllmEngine(float32_copy(), "remote", other.address, **EAGER) as engine,
    ):
        done = engine.wait_ready().run(prompts, TOKENS)
    assert all(equal(done["outputs"], plain))
    assert done["accepted"] > 0


def test_lookups_alone_with_earlier_answers(prompts: list[list[int]], plain: list[list[int]]) -> None:
    variables = {"SPECPOOL_DRAFT_METHOD": "suffix", "SPECPOOL_LOOKUP_STORE_TOKENS": "65536"}
    with VllmEngine(float32_copy(), "remote", variables=variables, **EAGER) as alone:
        alone.wait_ready()
        first, repeated = (alone.run(prompts, TOKENS, at_a_time=2) for _ in range(2))
    assert all(equal(first["outputs"], plain) + equal(repeated["outputs"], plain))
    assert repeated["accepted"] > first["accepted"]


def test_preempted_rows(draft: DraftProcess, prompts: list[list[int]], plain_long: list[list[int]]) -> None:
    """The KV cache holds few long rows, so vLLM preempts and resumes the others."""
    small = {"max_model_len": 512, "num_gpu_blocks_override": 6}
    with VllmEngine(float32_copy(), "remote", draft.address, **small, **EAGER) as few:
        done = few.wait_ready().run(prompts[:LONG_ROWS], MANY_TOKENS)
    assert done["preemptions"] > 0
    assert all(equal(done["outputs"], plain_long[:LONG_ROWS]))


def test_a_killed_draft_worker_only_costs_drafts(
    draft: DraftProcess, engine: VllmEngine, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    done: list[dict[str, Any]] = []
    thread = Thread(target=lambda: done.extend(engine.run(prompts, TOKENS) for _ in range(2)))
    thread.start()
    draft.kill()
    thread.join()
    draft.start()
    while not done[-1]["accepted"]:
        done.append(engine.run(prompts, TOKENS))
        assert len(done) < 50
    assert all(all(equal(run["outputs"], plain)) for run in done)


def test_two_servers_share_a_draft_worker(
    draft: DraftProcess, engine: VllmEngine, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    done: list[dict[str, Any]] = []
    with VllmEngine(float32_copy(), "remote", draft.address, **EAGER) as other:
        other.wait_ready()
        both = [Thread(target=lambda used=used: done.append(used.run(prompts, TOKENS))) for used in (engine, other)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert len(done) == 2
    assert all(all(equal(run["outputs"], plain)) for run in done)

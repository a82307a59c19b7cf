"""Files of a model that take gigabytes or hours: only the request that needs them fails."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from grpc import StatusCode
from hostile_models import FilesTarget, growing_tokenizer, prepending_tokenizer
from secure_service import until
from serving import PATIENCE_SECONDS, Serving, make_request, refusal, violated_fields
from serving import serving as serving_locally
from tokenizers import Tokenizer

from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.process_link import ProcessLink
from coordinator.prompts.tokenizer_pool import LimitError, TimeLimits, TokenizerPool
from specpool.testing import byte_tokenizer
from specpool.v1 import generation_pb2 as pb

serving = partial(serving_locally, new_pool=TokenizerPool)
TEMPLATE = "{% if messages[0].role == 'bomb' %}BOMB{% else %}{{ messages[0].content }}{% endif %}"
SHORT_SECONDS = 0.3
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}WORK{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(99) %}{% set ns.x = DOUBLE %}{% endfor %}"
MAX_GROWTH = 64 * 2**20

IN_MEMORY = {
    "width of a format": "{{ '%2000000000s' % messages[0].content }}",
    "width of format()": "{{ '{:>2000000000}'.format(messages[0].content) }}",
    "format filter": "{{ '%2000000000s' | format(messages[0].content) }}",
    "center": "{{ messages[0].content.center(2000000000) }}",
    "center filter": "{{ messages[0].content | center(2000000000) }}",
    "ljust": "{{ messages[0].content.ljust(2000000000) }}",
    "zfill": "{{ messages[0].content.zfill(2000000000) }}",
    "indent": "{{ (messages[0].content ~ '\\n') * 1000 | indent(2000000, true) }}",
    "join": DOUBLED.replace("DOUBLE", "[ns.x, ns.x] | join"),
    "replace": DOUBLED.replace("DOUBLE", "ns.x | replace('x', 'xx')"),
    "tilde": DOUBLED.replace("DOUBLE", "ns.x ~ ns.x"),
    "plus": DOUBLED.replace("DOUBLE", "ns.x + ns.x"),
    "product": "{{ messages[0].content * 2000000000 }}",
    "product of lists": "{{ ([0] * 1000000000) | length }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "wordwrap": "{{ ('a ' * 1000) | wordwrap(1, wrapstring='x' * 10000000) }}",
    "tojson": "{{ [1] | tojson(indent=2000000000) }}",
    "batch": "{{ 'a' | batch(1000000000, 0) | list | length }}",
    "macro": "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endmacro %}{{ f() | length }}",
}
IN_TIME = {
    "loops": LOOP.replace("WORK", ""),
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "joins": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
    "power": "{{ (9 ** (9 ** 9)) % 7 }}",
    "set block": "{% set x %}" + LOOP.replace("WORK", "") + "{% endset %}",
}


def chat(role: str, content: str = "x") -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content)]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages), sampling_params=pb.SamplingParams(max_tokens=4))


def text(content: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=content, sampling_params=pb.SamplingParams(max_tokens=4))


async def refused_beside_others(served: Serving, bomb: pb.GenerateRequest, fields: list[str], reason: str) -> None:
    """Send a request twice at once. It fails while others are served, and the coordinator stays small."""
    process = psutil.Process()
    before, largest = process.memory_info().rss, 0
    bombs = [asyncio.create_task(refusal(served.stub.Generate(bomb))) for _ in range(2)]
    while not all(task.done() for task in bombs):
        await served.expect(make_request(max_tokens=4))
        largest = max(largest, process.memory_info().rss)
    for error in await asyncio.gather(*bombs):
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == fields
        assert reason in error.details()
        assert "Traceback" not in error.details()
    assert largest < before + MAX_GROWTH


def template_of(bombs: dict[str, str]) -> str:
    """Return a template that explodes for messages with the name of a bomb as their role."""
    cases = "".join(f"{{% elif messages[0].role == '{name}' %}}{bomb}" for name, bomb in bombs.items())
    return "{% if messages[0].role == 'user' %}{{ messages[0].content }}" + cases + "{% endif %}"


@pytest.mark.parametrize("bombs", [["center filter"], pytest.param([*IN_MEMORY], marks=pytest.mark.slow)])
async def test_templates_that_take_gigabytes_fail_their_chats_only(bombs: list[str]) -> None:
    async with serving(FilesTarget(template_of(IN_MEMORY)), with_draft=False) as served:
        for bomb in bombs:
            await refused_beside_others(served, chat(bomb), ["chat.messages"], "chat template")
            innocent = await served.stub.Generate(chat("user", bomb))
            assert list(innocent.token_ids) == served.target.continuation(byte_tokenizer().encode(bomb).ids, 4)


@pytest.mark.parametrize("bombs", [["power"], pytest.param([*IN_TIME], marks=pytest.mark.slow)])
async def test_templates_that_take_hours_fail_their_chats_only(bombs: list[str]) -> None:
    # A busy machine gives a process little processor time.
    patient = partial(TokenizerPool, new_link=partial(ProcessLink, patience=60 / SHORT_SECONDS))
    async with serving(FilesTarget(template_of(IN_TIME)), with_draft=False, new_pool=patient) as served:
        served.process.coordinator.tokenizers.times = TimeLimits(seconds=SHORT_SECONDS)
        for bomb in bombs:
            await refused_beside_others(served, chat(bomb), ["chat.messages"], "template takes more than 0.3 s")
            assert (await served.stub.Generate(chat("user", "hello"))).usage.prompt_tokens == 5


@pytest.mark.parametrize("make", [growing_tokenizer, pytest.param(prepending_tokenizer, marks=pytest.mark.slow)])
async def test_a_tokenizer_that_takes_gigabytes_fails_its_prompt_only(make: Callable[[], Tokenizer]) -> None:
    target = FilesTarget(TEMPLATE, make().to_str(), max_model_len=4096)
    async with serving(target, with_draft=False) as served:
        await refused_beside_others(served, text("x" * 1000), ["text"], "the tokenizer takes more than 256 MiB")
        await refused_beside_others(served, chat("user", "x" * 1000), ["chat.messages"], "the tokenizer takes more")
        if make is growing_tokenizer:
            assert (await served.stub.Generate(text("hello"))).usage.prompt_tokens == 5


async def test_prompts_after_a_bomb_are_answered_by_new_processes() -> None:
    async with serving(FilesTarget(TEMPLATE, growing_tokenizer().to_str()), with_draft=False) as served:
        bombs = [refusal(served.stub.Generate(text("x" * 50))) for _ in range(3)]
        innocents = [served.stub.Generate(text("hello")) for _ in range(8)]
        for error in await asyncio.gather(*bombs):
            assert "the tokenizer takes more than" in error.details()
        for call in innocents:
            assert (await call).usage.prompt_tokens == 5


async def test_a_killed_prompt_process_fails_no_request() -> None:
    loops = "{% for i in range(2000) %}{% for j in range(9999) %}{% endfor %}{% endfor %}done"
    async with serving(FilesTarget(TEMPLATE.replace("BOMB", loops)), with_draft=False) as served:
        pool = served.process.coordinator.tokenizers
        pool.times = TimeLimits(seconds=PATIENCE_SECONDS)
        call = served.stub.Generate(chat("bomb"))
        await until(lambda: any(map(is_busy, pool.pids)))
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        assert (await call).usage.prompt_tokens == len("done")
        assert (await served.stub.Generate(text("hello"))).usage.prompt_tokens == 5


def is_busy(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).cpu_times().user > 0.4)
    except psutil.Error:
        return False


async def test_a_tokenizer_is_loaded_again_after_a_failure_that_may_pass() -> None:
    target, can_start = FilesTarget(TEMPLATE), False

    class Failing(TokenizerPool):
        async def load(self, *files: Any) -> TokenizerDescription:
            if not can_start:
                raise LimitError("no process can start")
            return await super().load(*files)

    async with serving(with_draft=False, with_target=False, new_pool=Failing) as served:
        try:
            await target.start(served.target_address)
            await served.until(lambda info: "unusable tokenizer: no process can start" in info.target.reason)
            assert (await refusal(served.stub.Generate(text("hello")))).code() is StatusCode.UNAVAILABLE
            can_start = True
            await served.until_ready(False)
            assert (await served.stub.Generate(text("hello"))).usage.prompt_tokens == 5
        finally:
            await target.stop()

"""The tokenizer pool: its processes are limited, replaced when they die, and leave nothing behind."""

import asyncio
import os
import random
import signal
import string
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import psutil
import pytest
import pytest_asyncio
from secure_service import until
from serving import PATIENCE_SECONDS
from tiny_tokenizers import BYTES
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from coordinator.prompts import tokenizer_pool
from coordinator.prompts.description import TokenizerError
from coordinator.prompts.frames import Allowance, Kind
from coordinator.prompts.process_link import ProcessDiedError, ProcessLink
from coordinator.prompts.tokenizer_pool import (
    Constraint,
    LimitError,
    Prompt,
    PromptError,
    TimeLimits,
    TokenizerPool,
    TooLongError,
)
from specpool.protocol.errors import UnavailableError
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

TEMPLATE = "{{ messages[0].content }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(max_waiting=100)
    yield pool
    await pool.close()


def files(template: str = TEMPLATE, tokenizer: Library = BYTES) -> TokenizerFiles:
    return TokenizerFiles(tokenizer.to_str().encode(), template, {}, (EOS_TOKEN_ID,))


def text(content: str, max_tokens: int = 2**20, client: str = "a") -> Prompt:
    return Prompt(client, len(content), lambda: content, False, max_tokens, 2**24)


def chat(content: str, client: str = "a") -> Prompt:
    messages = [{"role": "user", "content": content}]
    return Prompt(client, len(content), lambda: (messages, [], {}), True, 2**20, 2**24)


async def encode(pool: TokenizerPool, prompt: Prompt) -> list[int]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await pool.encode(prompt)


async def test_texts_and_chats_of_any_size_are_tokenized(pool: TokenizerPool) -> None:
    described = await pool.load(files(), VOCAB_SIZE)
    assert described.template is not None
    assert described.files.eos_token_ids == (EOS_TOKEN_ID,)
    assert described.longest_token_bytes == len("<eos>")
    for content in ("", "é", "hello " * 20_000, "x" * 2**20):
        expected = BYTES.encode(content).ids
        assert await encode(pool, text(content)) == await encode(pool, chat(content)) == expected
    with pytest.raises(TooLongError, match="has 101 tokens"):
        await encode(pool, text("x" * 101, max_tokens=100))


async def test_waiting_prompts_share_the_processes(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    prompts = [f"prompt {number}" for number in range(200)]
    answers = await asyncio.gather(*(encode(pool, text(p, client=str(i))) for i, p in enumerate(prompts)))
    assert answers == [BYTES.encode(prompt).ids for prompt in prompts]


async def test_errors_reach_the_caller_and_free_the_process(pool: TokenizerPool) -> None:
    await pool.load(files("{{ raise_exception('never') }}"), VOCAB_SIZE)

    def fail() -> None:
        raise ValueError("wrong")

    for _ in range(5):
        with pytest.raises(ValueError, match="wrong"):
            await pool.encode(text("a"), before=fail)
        with pytest.raises(PromptError, match="rejects these messages: never"):
            await encode(pool, chat("a"))
    assert await encode(pool, text("a")) == BYTES.encode("a").ids


# --- Processes that die


async def test_a_process_that_died_idle_is_replaced(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    for _ in range(3):
        for pid in (pids := pool.pids):
            with suppress(ProcessLookupError):  # one that died idle is replaced when it is needed
                os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(link.is_usable and link.pid in pids for link in pool._links))
        assert await encode(pool, text("a")) == BYTES.encode("a").ids


@pytest.mark.parametrize("act", ["os.close(1); time.sleep(3600)", "os.write(1, bytes(10**8))"])
async def test_a_process_that_misbehaves_is_ended_and_leaves_no_descriptors(act: str) -> None:
    code = f"import os, sys, time; sys.stdin.buffer.read(5); {act}"
    before = psutil.Process().num_fds()
    link = ProcessLink([sys.executable, "-c", code], patience=0.1)
    await link.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(ProcessDiedError):
            await link.ask(Kind.TEXT, b"", Allowance.prompt(0, 3.0), 100)
    assert not link.is_usable
    await until(lambda: psutil.Process().num_fds() <= before)


async def test_a_stopped_process_does_not_hold_its_prompt_forever() -> None:
    pool = TokenizerPool(100, partial(ProcessLink, patience=5.0))
    await pool.load(files(), VOCAB_SIZE)
    await until(lambda: all(link.loaded for link in pool._links))
    pool.times = TimeLimits(seconds=0.1)
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    assert await encode(pool, text("a")) == BYTES.encode("a").ids
    await pool.close()


async def test_a_cancelled_prompt_frees_its_process(pool: TokenizerPool) -> None:
    await pool.load(files(LOOP), VOCAB_SIZE)
    pool.times = TimeLimits(seconds=0.3)
    for _ in range(3):
        endless = asyncio.create_task(pool.encode(chat("a")))
        await asyncio.sleep(0.05)
        endless.cancel()
    for content in ("a", "b"):
        assert await encode(pool, text(content)) == BYTES.encode(content).ids


@pytest.mark.slow
async def test_a_process_that_keeps_much_memory_is_replaced(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    before = set(pool.pids)
    content = "hello, world" * 2**19
    assert len(await encode(pool, text(content, max_tokens=2**24))) == len(content)
    await until(lambda: len({*pool.pids} - before) == 1)
    assert await encode(pool, text("a")) == BYTES.encode("a").ids
    assert not any(psutil.pid_exists(pid) for pid in before - set(pool.pids))


# --- Isolation


async def test_the_processes_inherit_no_secrets_and_no_descriptors(pool: TokenizerPool) -> None:
    with mock.patch.dict(os.environ, SPECPOOL_SECRET="x", HF_TOKEN="y"):
        await pool.load(files(), VOCAB_SIZE)
    await until(lambda: len(pool.pids) == 2)
    for pid in pool.pids:
        process = psutil.Process(pid)
        assert process.environ().keys() <= {"PYTHONPATH", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM", "TZ"} | {
            "LD_LIBRARY_PATH",
            "PYTHONHOME",
            "LC_CTYPE",  # Python sets it
        }
        assert process.net_connections() == []
        await until(lambda process=process: process.open_files() == [])  # a process that starts reads files


def test_the_process_loads_only_what_it_needs() -> None:
    program = "import coordinator.prompts.process, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"grpc", "google", "torch", "transformers", "asyncio", "numpy"} & set(done.stdout.split())


def children() -> list[int]:
    """Process ids of all prompt processes that this process has started."""
    return [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


async def test_processes_end_with_the_pool() -> None:
    before = children()
    pool = TokenizerPool(max_waiting=100)
    await pool.load(files(LOOP), VOCAB_SIZE)
    endless = asyncio.create_task(pool.encode(chat("a")))
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await endless
    await asyncio.sleep(0.1)
    assert children() == before


@pytest.mark.parametrize("seconds", [0.0, 0.1])
async def test_processes_end_with_a_pool_that_has_just_started(seconds: float) -> None:
    before = children()
    pool = TokenizerPool(max_waiting=100)
    pool.start()
    loading = asyncio.create_task(pool.load(files(), VOCAB_SIZE))
    await asyncio.sleep(seconds)
    loading.cancel()
    await pool.close()
    await asyncio.gather(loading, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert children() == before


ORPHANS = """
import asyncio, sys
sys.path.insert(0, "tests/support")
from test_tokenizer_pool import LOOP, TokenizerPool, VOCAB_SIZE, chat, files, text
async def main():
    pool = TokenizerPool(100)
    await pool.load(files(LOOP), VOCAB_SIZE)
    await asyncio.gather(*(pool.encode(text("a", client=c)) for c in "ab"))
    rendering = asyncio.create_task(pool.encode(chat("a")))
    await asyncio.sleep(0.2)
    print(*pool.pids, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_end_when_the_coordinator_is_killed() -> None:
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORPHANS, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()

    def has_ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await until(lambda: all(map(has_ended, pids)))


# --- Tokenizers and replies that cannot be trusted


def replaced(times: int, *, decode: bool) -> Library:
    """Return a tokenizer that makes each `x` 100 times longer, several times."""
    tokenizer = byte_tokenizer()
    if decode:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *[decoders.Replace("x", "x" * 100)] * times])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("x", "x" * 100)] * times)
    return tokenizer


def with_decoder(decoder: decoders.Decoder) -> Library:
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (files("{% for %}"), "the chat template does not compile"),
        (files(tokenizer=replaced(5, decode=True)), "its decoder can make text more than 8 times longer"),
    ],
)
async def test_unusable_tokenizers_are_refused_with_a_reason(
    pool: TokenizerPool, broken: TokenizerFiles, reason: str
) -> None:
    for _ in range(2):
        with pytest.raises(TokenizerError, match=reason):
            await pool.load(broken, VOCAB_SIZE)
    await pool.load(files(), VOCAB_SIZE)
    assert await encode(pool, text("a")) == BYTES.encode("a").ids


def wide_trie() -> bytes:
    """Return a tokenizer.json of 4 MB that takes a gigabyte: each character of its tokens is a node of a tree."""
    chance = random.Random(1)
    vocab = [("".join(chance.choices(string.ascii_lowercase, k=4000)), 0.0) for _ in range(1000)]
    return Library(models.Unigram(vocab, 0)).to_str().encode()


@pytest.mark.slow
async def test_a_process_that_cannot_load_the_tokenizer_gets_no_prompt() -> None:
    """It loaded before, so the cause is a lack of memory."""
    refusals = 0

    class Refusing(ProcessLink):
        async def ask(self, kind: Kind, *others: Any) -> tuple[Kind, bytes]:
            nonlocal refusals
            if kind is Kind.LOAD and refusals:
                refusals -= 1
                return Kind.REFUSED, b"out of memory"
            return await super().ask(kind, *others)

    pool = TokenizerPool(100, Refusing)
    pool.times = TimeLimits(restart_seconds=0.05)
    await pool.load(files(), VOCAB_SIZE)
    await until(lambda: all(link.loaded for link in pool._links))
    refusals = 3
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="cannot start a prompt process"):
        await encode(pool, text("a"))
    await until(lambda: not refusals)
    assert await encode(pool, text("a")) == BYTES.encode("a").ids
    await pool.close()


@pytest.mark.slow
async def test_a_tokenizer_that_kills_the_process_is_refused(pool: TokenizerPool) -> None:
    with pytest.raises(LimitError, match=r"loading it takes more than \d+ MiB"):
        await pool.load(TokenizerFiles(wide_trie(), "", {}, ()), VOCAB_SIZE)
    await pool.load(files(), VOCAB_SIZE)
    assert await encode(pool, text("a")) == BYTES.encode("a").ids


async def test_malformed_replies_end_the_process(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    with pytest.raises(UnavailableError), mock.patch.object(tokenizer_pool, "MAX_REASON_BYTES", -2):
        await encode(pool, text("aaa", max_tokens=0))
    assert await encode(pool, text("a")) == BYTES.encode("a").ids


# --- Constraints

POINT = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'


async def compile_(pool: TokenizerPool, kind: str, text: str, client: str = "a") -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await pool.compile(client, Constraint(kind, text))


async def test_constraints_become_grammars_or_refusals(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    for _ in range(4):
        assert "json_schema" in await compile_(pool, "json_schema", POINT)
        with pytest.raises(PromptError, match="does not compile: Invalid type: foo"):
            await compile_(pool, "json_schema", '{"type": "foo"}')
    assert await encode(pool, text("a")) == BYTES.encode("a").ids


async def test_a_constraint_that_takes_too_long_harms_only_itself(pool: TokenizerPool) -> None:
    await pool.load(files(), VOCAB_SIZE)
    await compile_(pool, "json_schema", POINT)
    pool.times = TimeLimits(constraint_seconds=0.05)
    with pytest.raises(LimitError, match=r"compiling it takes more than (0.05 s|256 MiB)"):
        await compile_(pool, "regex", "(a{1000}){1000}")
    assert "json_schema" in await compile_(pool, "json_schema", POINT, client="b")

"""Errors of `vllm serve` without usable drafts. Only `make test-vllm` runs this test."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_tokenizers import METASPACE
from vllm_server import START_SECONDS, VllmServer

from benchmarks.pair import save_tokenizer
from benchmarks.vllm_process import draft_process
from specpool.engine.models.embedded_pair import float32_copy

pytestmark = pytest.mark.vllm

NOWHERE = "127.0.0.1:1"


def test_vllm_exits_with_the_reason_in_one_line(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, other_draft = float32_copy(), tmp_path_factory.mktemp("draft") / "words"
    shutil.copytree(tiny_pair[1], other_draft)
    save_tokenizer(other_draft, METASPACE)  # has words, but no letters
    with ExitStack() as stack:
        other = stack.enter_context(draft_process(other_draft, 1)).address
        cases = [
            (NOWHERE, {"SPECPOOL_DRAFT_ADDRES": NOWHERE}, "unknown environment variable SPECPOOL_DRAFT_ADDRES"),
            (
                NOWHERE,
                {"SPECPOOL_DRAFT_START_SECONDS": "2"},
                f"cannot use the draft worker at {NOWHERE}: no answer in 2 s: UNAVAILABLE: ",
            ),
            (
                other,
                {},
                f"cannot use the draft worker at {other}: the draft {other_draft} uses a different tokenizer than the "
                f"target {target}, which its worker cannot translate: even a perfect draft would get only ",
            ),
        ]
        servers = [
            stack.enter_context(VllmServer(target, tmp_path_factory.mktemp("vllm"), address, **variables))
            for address, variables, _ in cases
        ]
        for server, (_, _, reason) in zip(servers, cases, strict=True):
            assert server.process.wait(START_SECONDS) != 0
            (line,) = [line for line in server.log.read_text().splitlines() if "RemoteDraft cannot start" in line]
            assert " ERROR " in line
            assert reason in line

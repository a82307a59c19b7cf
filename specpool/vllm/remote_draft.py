"""The class that vLLM loads: `--speculative-config '{"method": "custom_class", "model": "specpool.vllm.RemoteDraft"}'`.

    vLLM's step -> propose: rows -> sequences -> round of the draft worker -> drafts -> vLLM's next step verifies them

Whatever becomes of the draft worker after the start costs drafts only.
"""

import atexit
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from coordinator.workers.errors import MismatchError, WorkerRefusedError, WorkerUnreachableError
from specpool.rpc.security.channel import Connector
from specpool.vllm.drafter import Drafter
from specpool.vllm.link import BlockingDraftLink, ServedModel
from specpool.vllm.rows import Batch
from specpool.vllm.served import TRIED, Served, vllm_version
from specpool.vllm.settings import RemoteDraftSettings

# Below vLLM's own logger, whose handlers and level serve here too.
log = logging.getLogger("vllm.specpool")

LOST_TEMPERATURES = (
    "vLLM for CPU loses temperature, top_p and top_k where it verifies drafts, whoever made them: ask it for greedy "
    "answers only (https://github.com/vllm-project/vllm/issues/55005)"
)
# Seconds between lines about errors that every step may have.
SECONDS_BETWEEN_ERRORS = 60.0
# Where drafts do not pay, looking at the rows may take this share of vLLM's time. The steps between are not looked at,
# at most so many.
SHARE_OF_LOOKING, MOST_SKIPPED = 0.005, 16


class RemoteDraft:
    """Drafts of a Specpool draft worker for vLLM's batch."""

    def __init__(self, vllm_config: Any) -> None:
        """Waits for the draft worker. ValueError, in one line: settings are wrong, the draft worker does not answer, or
        its tokenizer is another one."""
        self._link: BlockingDraftLink | None = None
        self._ended = time.perf_counter()
        self._complained = -SECONDS_BETWEEN_ERRORS
        self._took = 0.0
        """Seconds that the last drafts took."""
        self._to_skip = self._skipped = 0
        """Steps that are not looked at before the next one, and since the last one, that is."""
        try:
            self._start(vllm_config)
        except ValueError as error:
            # vLLM ends with the tracebacks of three processes, in which the reason is hard to find.
            log.error("RemoteDraft cannot start: %s", error)
            raise

    def _start(self, vllm_config: Any) -> None:
        self._settings = RemoteDraftSettings.of_environment()
        served = Served(vllm_config)
        self._drafter = Drafter(served.limits(self._settings.draft_max_length, self._settings.prefill_tokens))
        if served.drafts:
            _log_as_vllm()
            _warn_of_other_versions()
            if served.on_cpu:
                log.warning(LOST_TEMPERATURES)
            self._link = self._connected(served)

    def _connected(self, served: Served) -> BlockingDraftLink:
        settings = self._settings
        connector = Connector(settings.draft_address, **settings.security)
        link = BlockingDraftLink(
            connector, f"vllm-{uuid.uuid4().hex}", settings.draft_timeout_seconds, ServedModel(served.info())
        )
        try:
            link.start(settings.draft_start_seconds)
        except (MismatchError, TimeoutError) as error:
            link.close()
            raise ValueError(f"the draft worker at {settings.draft_address} cannot be used: {error}") from None
        log.info("The draft worker at %s drafts for vLLM", settings.draft_address)
        atexit.register(self.close)
        return link

    def load_model(self, *_: Any, **__: Any) -> None:
        """Loads nothing: the draft's weights are in the draft worker. vLLM calls it when its own are loaded."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]] = (),
        num_tokens_no_spec: Any = None,
        token_ids_cpu: Any = None,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """The draft tokens of each row of vLLM's batch, at most `num_speculative_tokens`; never raises.

        `sampled_token_ids`: the tokens that each row gained in this step, none while its prompt is being prefilled.
        `num_tokens_no_spec`: [rows], tokens of each row with those. `token_ids_cpu`: [rows, max_model_len].
        """
        if self._link is None:
            return _none(sampled_token_ids)
        if self._to_skip:
            self._to_skip, self._skipped, self._ended = self._to_skip - 1, self._skipped + 1, time.perf_counter()
            return _none(sampled_token_ids)
        began = time.perf_counter()
        try:
            batch = Batch(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            step_seconds = began - self._ended
            drafts = self._propose(self._link, batch, step_seconds)
            self._to_skip = self._steps_to_skip(step_seconds, time.perf_counter() - began)
            return drafts
        except Exception:  # drafts are never worth a request
            if began - self._complained >= SECONDS_BETWEEN_ERRORS:
                self._complained = began
                log.exception("No drafts in this step (vLLM %s; tried: %s)", vllm_version(), ", ".join(TRIED))
            self._link.release(self._drafter.forget_rows())
            return _none(sampled_token_ids)
        finally:
            self._ended = time.perf_counter()
            self._took = self._ended - began

    def _propose(self, link: BlockingDraftLink, batch: Batch, step_seconds: float) -> list[list[int]]:
        drafter = self._drafter
        items, gone = drafter.begin(batch, link.model, step_seconds, self._took, self._skipped)
        self._skipped = 0
        link.release(gone)
        if items:
            # The link has logged what failed, and rests for a while.
            with suppress(WorkerUnreachableError, WorkerRefusedError, TimeoutError):
                proposals, timed = link.propose(drafter.round_id, items, drafter.drafting.hints, step_seconds)
                drafter.take(items, proposals, timed)
        return drafter.drafts()

    def _steps_to_skip(self, step_seconds: float, seconds: float) -> int:
        """Steps that need no look at the rows, which took so many seconds."""
        if not self._drafter.may_rest:
            return 0
        return min(MOST_SKIPPED, int(seconds / (SHARE_OF_LOOKING * step_seconds)))

    def close(self) -> None:
        """Frees what the draft worker holds for this process."""
        link, self._link = self._link, None
        if link is not None:
            atexit.unregister(self.close)
            with suppress(Exception):
                link.close()


def _none(sampled_token_ids: Any) -> list[list[int]]:
    """No drafts for any row."""
    return [[] for _ in sampled_token_ids or ()]


def _log_as_vllm() -> None:
    """Has vLLM's handlers write what becomes of the draft worker, too."""
    theirs, links = logging.getLogger("vllm"), logging.getLogger("coordinator.workers")
    for handler in theirs.handlers:
        links.addHandler(handler)
    links.setLevel(theirs.level)


def _warn_of_other_versions() -> None:
    installed = vllm_version()
    if installed is None or not installed.startswith(TRIED):
        log.warning("vLLM %s has not been tried with Specpool, only %s", installed, ", ".join(TRIED))

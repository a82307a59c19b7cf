"""The class that vLLM loads: `--speculative-config '{"method": "custom_class", "model": "specpool.vllm.RemoteDraft"}'`.

    vLLM's step -> propose: rows -> sequences -> round of the draft worker -> drafts -> vLLM's next step verifies them

After the start, failures of the draft worker only cost drafts.
"""

import atexit
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from coordinator.workers.interface import MismatchError, WorkerRefusedError, WorkerUnreachableError
from specpool.drafting.plans import DraftMethod
from specpool.rpc.security.channel import Connector
from specpool.vllm.drafter import Drafter
from specpool.vllm.link import BlockingDraftLink, ServedModel
from specpool.vllm.rows import Batch
from specpool.vllm.settings import TESTED_VERSION, RemoteDraftSettings, VllmModel, vllm_version

# A child of vLLM's logger inherits its handlers and level.
log = logging.getLogger("vllm.specpool")

CPU_SAMPLING_WARNING = (
    "vLLM for CPU ignores temperature, top_p and top_k when it verifies drafts of any kind: use greedy requests only "
    "(https://github.com/vllm-project/vllm/issues/55005)"
)
RUNNER_WARNING = (
    "vLLM %s does not use Model Runner V1, which calls custom drafters, so it may never request drafts; unset "
    "VLLM_USE_V2_MODEL_RUNNER, or use a version that still has V1"
)
# Minimum seconds between log lines about errors that may repeat in every step.
SECONDS_BETWEEN_ERRORS = 60.0
# Where drafts do not pay, inspecting rows may take this share of vLLM's time. Steps in between are skipped, up to this
# number in a row.
INSPECTION_SHARE, MAX_SKIPPED = 0.005, 16


class RemoteDraft:
    """Draft tokens for vLLM's batch, from a Specpool draft worker and from lookups in earlier tokens."""

    def __init__(self, vllm_config: Any) -> None:
        """Wait for the draft worker, if there is one.

        Raises ValueError with a one-line message for invalid settings, a worker that does not answer, or a worker that
        cannot translate vLLM's tokens.
        """
        self._drafter: Drafter | None = None
        """None if this rank does not draft."""
        self._link: BlockingDraftLink | None = None
        """None if all drafts come from lookups."""
        self._step_began = time.perf_counter()
        self._error_logged = -SECONDS_BETWEEN_ERRORS
        self._draft_seconds = 0.0
        """Duration of the last `propose`."""
        self._to_skip = self._skipped = 0
        """Steps to skip before the next inspection, and steps skipped since the last one."""
        try:
            self._start(vllm_config)
        except ValueError as error:
            # Log the reason first: vLLM exits with the tracebacks of three processes.
            log.error("RemoteDraft cannot start: %s", error)
            raise

    def _start(self, vllm_config: Any) -> None:
        settings = RemoteDraftSettings.from_environment()
        model = VllmModel(vllm_config)
        if model.drafts:
            _log_links_to_vllm()
            if not (vllm_version() or "").startswith(TESTED_VERSION):
                log.warning("vLLM %s is untested with Specpool (tested: %s)", vllm_version(), TESTED_VERSION)
            if not model.uses_runner_v1:
                log.warning(RUNNER_WARNING, vllm_version())
            if model.on_cpu:
                log.warning(CPU_SAMPLING_WARNING)
            if settings.draft_address is not None:
                self._link = self._connect(settings.draft_address, settings, model)
            else:
                log.info("drafting for vLLM by prompt lookup only; set SPECPOOL_DRAFT_ADDRESS to add a draft worker")
            self._drafter = Drafter(model.limits(settings), DraftMethod(settings.draft_method))

    def _connect(self, address: str, settings: RemoteDraftSettings, model: VllmModel) -> BlockingDraftLink:
        tokenizer = model.tokenizer()
        connector, target = Connector(address, **settings.security), ServedModel(model.info(tokenizer), tokenizer)
        link = BlockingDraftLink(connector, f"vllm-{uuid.uuid4().hex}", settings.draft_timeout_seconds, target)
        try:
            link.start(settings.draft_start_seconds)
        except (MismatchError, TimeoutError) as error:
            link.close()
            raise ValueError(f"cannot use the draft worker at {address}: {error}") from None
        log.info("draft worker at %s drafts for vLLM", address)
        if link.model is not None and link.model.info.tokenizer_translation:
            info = link.model.info
            text = "the draft worker translates tokens (%s): %s has %.0f%% of vLLM's vocabulary"
            log.info(text, info.tokenizer_translation, info.model, 100 * info.vocabulary_coverage)
        atexit.register(self.close)
        return link

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the draft worker has the weights. vLLM calls this after loading its own."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]] = (),
        num_tokens_no_spec: Any = None,
        token_ids_cpu: Any = None,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Up to `num_speculative_tokens` draft tokens for each row of vLLM's batch. Never raises.

        `sampled_token_ids`: tokens gained by each row in this step, none during prefill. `num_tokens_no_spec`: [rows],
        tokens of each row, including those. `token_ids_cpu`: [rows, max_model_len].
        """
        drafter = self._drafter
        if drafter is None:
            return _no_drafts(sampled_token_ids)
        if self._to_skip:
            self._to_skip, self._skipped, self._step_began = self._to_skip - 1, self._skipped + 1, time.perf_counter()
            return _no_drafts(sampled_token_ids)
        began = time.perf_counter()
        try:
            batch = Batch(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            step_seconds = began - self._step_began
            drafts = self._propose(drafter, batch, step_seconds)
            if drafter.may_skip:
                seconds = time.perf_counter() - began
                self._to_skip = min(MAX_SKIPPED, int(seconds / (INSPECTION_SHARE * step_seconds)))
            return drafts
        except Exception:  # an error here must not fail vLLM's requests
            if began - self._error_logged >= SECONDS_BETWEEN_ERRORS:
                self._error_logged = began
                log.exception(
                    "drafting failed; this step has no drafts (vLLM %s, tested: %s)", vllm_version(), TESTED_VERSION
                )
            self._release(drafter.forget_rows())
            return _no_drafts(sampled_token_ids)
        finally:
            self._step_began = time.perf_counter()
            self._draft_seconds = self._step_began - began

    def _propose(self, drafter: Drafter, batch: Batch, step_seconds: float) -> list[list[int]]:
        link = self._link
        model = None if link is None else link.model
        items, gone = drafter.begin(batch, model, step_seconds, self._draft_seconds, self._skipped)
        self._skipped = 0
        self._release(gone)
        if link is not None and items:
            # The link logs failures, and backs off.
            with suppress(WorkerUnreachableError, WorkerRefusedError, TimeoutError):
                proposals, timed = link.propose(drafter.round_id, items, drafter.drafting.hints, step_seconds)
                drafter.take(items, proposals, timed)
        return drafter.drafts()

    def _release(self, sequence_ids: list[int]) -> None:
        if self._link is not None:
            self._link.release(sequence_ids)

    def close(self) -> None:
        """Release this process's sequences in the draft worker."""
        self._drafter, link, self._link = None, self._link, None
        if link is not None:
            atexit.unregister(self.close)
            with suppress(Exception):
                link.close()


def _no_drafts(sampled_token_ids: Any) -> list[list[int]]:
    return [[] for _ in sampled_token_ids or ()]


def _log_links_to_vllm() -> None:
    """Write log lines about the draft worker with vLLM's handlers."""
    vllm, links = logging.getLogger("vllm"), logging.getLogger("coordinator.workers")
    for handler in vllm.handlers:
        links.addHandler(handler)
    links.setLevel(vllm.level)

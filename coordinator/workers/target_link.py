"""The link to the target worker."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import grpc

from coordinator.prompts.chat_formats import AUTO
from coordinator.prompts.description import TokenizerDescription, TokenizerError
from coordinator.prompts.tokenizer_pool import LimitError, TokenizerPool
from coordinator.workers.draft_link import check_pair
from coordinator.workers.interface import (
    Cause,
    Complete,
    MismatchError,
    UnusableModelError,
    WorkerRefusedError,
    WorkerUnreachableError,
)
from coordinator.workers.link import PROBE_TIMEOUT_SECONDS, WorkerLink, status_text, timed
from coordinator.workers.states import Backoff, LinkState
from coordinator.workers.streams import RoundCalls
from coordinator.workers.target_model import TargetModel
from specpool.drafting.costs import UNKNOWN_VERIFY, Timed
from specpool.protocol.codec import release_request, verify_request
from specpool.protocol.features import WantedFeatures
from specpool.protocol.responses import (
    InvalidResponseError,
    decoded,
    drops_features,
    max_verify_bytes,
    read_draft_rows,
    read_evicted_pages,
    read_tokenizer,
    read_verdicts,
)
from specpool.protocol.rounds import Verdict, VerifyItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.security.channel import Connector
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc

log = logging.getLogger(__name__)

TRIAL_ID = 0
"""Sequence id of trial rounds. Requests use larger ids."""
_UNRELATED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Status codes that make a trial round inconclusive."""


async def _complete() -> None:
    """The items are complete."""


class TargetLink(WorkerLink):
    """The target worker. `tokenizer` is set after the worker was first ready."""

    role = "target"
    _unknown_times = UNKNOWN_VERIFY
    tokenizer: TokenizerDescription | None = None
    chat_template: str | None = None
    """Replaces the model's chat templates."""
    reasoning_tags = AUTO
    on_replaced: Callable[[], None] | None = None
    """Called before the link uses another process."""
    on_evicted: Callable[[Items[bytes]], None] | None = None
    """Called with the digests of evicted pages."""
    replicas: "Callable[[], Iterable[TargetLink]]" = tuple
    """Returns the links to all workers that serve the model, including a standby."""
    _drops_features = False
    """Whether the worker has returned features of a wrong size."""
    _failed_id: int | None = None
    """A sequence of the last failed round. While set, the same process must serve a trial round to become ready."""

    def __init__(
        self,
        connector: Connector,
        coordinator_id: str,
        timeout_seconds: float,
        tokenizers: TokenizerPool,
        model: TargetModel | None = None,
    ) -> None:
        """`model`: shared by all links."""
        super().__init__(connector, coordinator_id, timeout_seconds)
        self._model, self._tokenizers = model or TargetModel(), tokenizers

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return target_worker_pb2_grpc.TargetWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.VerifyStream, self._timeout, self._check_instance)

    def _make_backoff(self) -> Backoff:
        return Backoff(first=0.0, second=0.05, maximum=2.0, reset_after=0)  # every request waits for the target

    async def _checked(self, info: WorkerInfo) -> WorkerInfo:
        self._model.check(info)
        if info.draft is not None:
            check_pair(info.draft, info)
        if self.info is None:
            async with self._model.reading_tokenizer:  # others may be described meanwhile
                self._model.check(info)
                described = next((other for other in self._others if other.info is not None), None)
                if described is not None:
                    self.tokenizer = described.tokenizer
                else:
                    await self._read_tokenizer(info)
        for other in self._others:  # unless the other's process has moved to this address
            if other.is_ready and info.instance_id == other.instance_id:
                raise MismatchError(f"the worker is a target worker already in use, known as {other.address}")
        if info.instance_id == self.instance_id:
            await self.try_round()
        self._failed_id = None
        return info

    @property
    def tokenizer_files(self) -> TokenizerFiles | None:
        """The target's tokenizer. None until the worker has been ready."""
        return self.tokenizer.files if self.tokenizer is not None else None

    @property
    def _others(self) -> "list[TargetLink]":
        """The links to other workers with the same model."""
        return [link for link in self.replicas() if link is not self]

    async def _read_tokenizer(self, info: WorkerInfo) -> None:
        response = await self._stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        files = read_tokenizer(decoded(response, "tokenizer"))
        if response.instance_id != info.instance_id:
            raise InvalidResponseError("the tokenizer comes from another process than the description")
        if self.chat_template is not None:
            files = replace(files, chat_template=self.chat_template, tool_chat_template="")
        try:
            self.tokenizer = await self._tokenizers.load(files, info.vocab_size, self.reasoning_tags)
        except TokenizerError as error:
            raise UnusableModelError(f"{info.model} has an unusable tokenizer: {error}") from None
        except LimitError as error:
            raise InvalidResponseError(f"unusable tokenizer: {error}") from None

    async def try_round(self) -> None:
        """After a failed round, run a trial round of one token to tell a broken worker from a bad request.

        Raises WorkerRefusedError if the trial round fails too, and AioRpcError or InvalidResponseError if it is
        inconclusive.
        """
        if self._failed_id is None:
            return
        items = [VerifyItem(TRIAL_ID, 0, (0,), sampling=SamplingParams())]
        request = verify_request(self._coordinator_id, 0, items)
        try:
            with self._releases.in_round([TRIAL_ID]):
                response = decoded(await self._stub.Verify(request, timeout=self._timeout), "trial round")
                if any(result.status == common_pb2.ITEM_STATUS_NO_SLOT for result in response.results):
                    # Free the failed sequence's slot for the trial. Its next round rebuilds the cache.
                    release = release_request(self._coordinator_id, [self._failed_id])
                    await self._stub.Release(release, timeout=self._timeout)
                    await self._stub.Verify(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNRELATED:
                raise
            raise WorkerRefusedError(f"the worker fails every round: {status_text(error)}") from None
        finally:
            self._releases.add([TRIAL_ID])
        self._failed_id = None

    async def check_rounds(self, instance_id: str) -> None:
        """Raise WorkerUnreachableError if the process that refused a round fails every round or has been replaced.

        If it fails every round, the link backs off until a trial round succeeds.
        """
        if self.instance_id != instance_id:
            raise WorkerUnreachableError("another target process took over", Cause.NOT_SENT)
        try:
            await self._returned(self.try_round())
        except (WorkerRefusedError, InvalidResponseError) as error:
            raise self._lost(str(error), Cause.FAILED) from None

    def has_ended(self, instance_id: str) -> bool | None:
        """Whether another process has replaced this one. None: unknown until the link is ready."""
        if instance_id != self.instance_id:
            return True
        return False if self.is_ready else None

    def abort_rounds(self) -> None:
        """End the rounds in progress with an error."""
        self._rounds.abort()

    def _replaced(self, info: WorkerInfo) -> None:
        described = [other.info for other in self._others if other.info is not None]
        if described:  # every sequence fits in all workers
            info = replace(info, max_model_len=min(each.max_model_len for each in (info, *described)))
        self._model.replace(info)
        if self.on_replaced is not None:
            self.on_replaced()

    def _refuse(self, error: MismatchError) -> None:
        """Raise the error, which stops the coordinator, unless another worker may serve the known model."""
        super()._refuse(error)
        if all(other.state is LinkState.REFUSED for other in self._others):
            raise error

    async def verify(
        self,
        round_id: int,
        items: list[VerifyItem],
        traceparent: str = "",
        complete: Complete = _complete,
        may_join: bool = False,
        features: WantedFeatures | None = None,
        hints: tuple[Iterable[float], float] = ((), 0.0),
    ) -> tuple[list[Verdict], Timed]:
        """Run a target round. Raises WorkerUnreachableError, WorkerRefusedError.

        An invalid response is retried once, since a repeated round gets the same answer. `traceparent`: parent span.
        `complete`: awaited before the response is read, which needs complete items. `may_join`: see `VerifyRequest`.
        `features`: for the items that want them. `hints`: see `verify_request`.
        """
        request = verify_request(self._coordinator_id, round_id, items, traceparent, may_join, features, hints)
        try:
            return await self._retried(lambda: self._verify(request, items, complete, features))
        except (WorkerUnreachableError, WorkerRefusedError) as error:
            if isinstance(error, WorkerRefusedError) or error.cause is not Cause.NOT_SENT:
                self._failed_id = items[0].sequence_id
            raise

    async def _retried(
        self, verify: Callable[[], Awaitable[tuple[list[Verdict], Timed]]]
    ) -> tuple[list[Verdict], Timed]:
        """Run a round, and retry it once if the response is invalid."""
        try:
            return await verify()
        except InvalidResponseError as error:
            log.error("invalid response of the worker at %s: %s", self.address, error)
            self._rounds.discard()  # a desynchronized stream does not recover
        try:
            return await verify()
        except InvalidResponseError as error:
            raise self._lost(f"invalid response, twice: {error}", Cause.FAILED) from None

    async def _verify(
        self,
        request: target_worker_pb2.VerifyRequest,
        items: list[VerifyItem],
        complete: Complete,
        features: WantedFeatures | None,
    ) -> tuple[list[Verdict], Timed]:
        response, elapsed = await self._round(request, lambda: max_verify_bytes(items, features))
        await complete()
        assert self.info is not None
        verdicts = read_verdicts(response, request.round_id, items, self.info.vocab_size, features)
        evicted = read_evicted_pages(response)
        self._backoff.succeeded()
        if self.on_evicted is not None:
            self.on_evicted(evicted)
        if features is not None and not self._drops_features and drops_features(response, verdicts):
            self._drops_features = True
            log.warning("ignoring features of the worker at %s: their size is wrong", self.address)
        return verdicts, _with_draft(timed(elapsed, response), response)


def _with_draft(verified: Timed, response: target_worker_pb2.VerifyResponse) -> Timed:
    """Add the duration of the carried draft, clamped like the others. Raises InvalidResponseError."""
    rows = tuple(read_draft_rows(response))
    return replace(verified, draft=min(response.draft_ns / 1e9, verified.wire), draft_rows=rows)

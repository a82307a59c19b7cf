"""The target worker's process: settings, model and server.

torch and transformers take seconds to import, so they are imported on the model thread, while the server is up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import ByteSize, Field, model_validator

from specpool.engine.config.options import INT8, Activations, EngineOptions, check_int8
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_same_tokenizer
from specpool.protocol.codec import read_verify_items, tokenizer_response, verify_response
from specpool.protocol.prefixes import MAX_EVICTED_PAGES
from specpool.protocol.rounds import Verdict, VerifyRound
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc as pb_grpc
from specpool.worker.process import importing, run_worker
from specpool.worker.round_merging import Work
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings
from specpool.worker.streams import MAX_ROUNDS_AHEAD

if TYPE_CHECKING:
    from target_worker.verifier import Verifier

PROGRAM = "specpool-target-worker"
SERVICE = "specpool.v1.TargetWorkerService"
ENGINE: dict[str, Any] = EngineOptions.model_fields
RANKS = {"tensor_parallel", "tensor_parallel_sums", "nnodes", "node_rank", "master_addr", "master_port"}
NOT_SHARED = RANKS | {"model", "revision", "target_model", "device", "weights", "activations"}
"""Options that a draft does not take from its target. Rank 0 runs the draft, unsharded."""
DRAFT_NAMES = {"model": "draft", "kv_memory": "draft_kv_memory"}
"""What the settings call the options of the draft."""


class TargetWorkerServicer(WorkerServicer, pb_grpc.TargetWorkerServiceServicer):
    method = "Verify"
    max_rounds_ahead = MAX_ROUNDS_AHEAD

    @staticmethod
    def read(request: pb.VerifyRequest, verifier: Verifier) -> VerifyRound:
        items = read_verify_items(request, verifier.limits)
        features = tuple(request.feature_layers), request.feature_window
        return VerifyRound(request.coordinator_id, request.round_id, items, request.may_join, *features)

    @staticmethod
    def serve(rounds: Sequence[VerifyRound], verifier: Verifier) -> list[tuple[list[Verdict], list[bytes]]]:
        """Verify rounds in one forward pass. Return the verdicts and unreported evicted pages of each round."""
        verdicts = verifier.verify(rounds)
        evicted = [verifier.take_evicted(round_.coordinator_id, MAX_EVICTED_PAGES) for round_ in rounds]
        return list(zip(verdicts, evicted, strict=True))

    @staticmethod
    def respond(
        round_id: int, served: tuple[list[Verdict], list[bytes]], spent: Mapping[str, int], instance_id: str
    ) -> pb.VerifyResponse:
        """Build the response to a round."""
        return verify_response(round_id, served[0], spent, instance_id, served[1])

    @staticmethod
    def work(round_: VerifyRound, verifier: Verifier) -> Work:
        """Return the cost: one forward pass."""
        served = (item for item in round_.items if verifier.has_room(round_.coordinator_id, item.sequence_id))
        return Work(sum(item.max_num_new_tokens + item.max_num_draft_tokens for item in served))

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realign, extend and verify one round."""
        response: pb.VerifyResponse = await self.round(request)
        return response

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        async for response in self.rounds(requests, context):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        return tokenizer_response(self._host.backend.tokenizer(), self._host.instance_id)


class TargetWorkerSettings(WorkerSettings, EngineOptions):
    """Verifies draft tokens with the target model."""

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    draft: str | None = Field(
        None,
        min_length=1,
        description="draft that the worker carries: hub id, folder or GGUF file; it runs on the target's device and "
        "shares its memory_limit or memory_budget; default: none",
    )
    draft_revision: str | None = ENGINE["revision"]
    draft_activations: Activations = ENGINE["activations"]
    draft_kv_memory: ByteSize | None = Field(
        None, description="size of the draft's KV cache; default: as many positions as the target's"
    )

    @property
    def draft_options(self) -> EngineOptions | None:
        """The draft's options; None: the worker carries no draft."""
        if self.draft is None:
            return None
        options = EngineOptions.of(self).model_dump(exclude_unset=True, exclude=NOT_SHARED)
        if self.draft_kv_memory is not None:
            options = {name: value for name, value in options.items() if name not in self.memory_limits}
            options["kv_memory"] = self.draft_kv_memory
        return EngineOptions(
            **options,
            model=self.draft,
            revision=self.draft_revision,
            target_model=self.model if self.revision is None else None,
            device=self.device.split(",")[0].strip(),
            activations=self.draft_activations,
        )

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        given = self.model_fields_set & {"draft_revision", "draft_activations", "draft_kv_memory"}
        if given and self.draft is None:
            raise ValueError(f"{min(given)} needs draft")
        if self.draft is not None and self.node_rank > 0:
            raise ValueError(f"draft must be given to node 0 only, and this is node {self.node_rank}")
        if self.draft_activations == INT8:
            devices = {"--device": self.device.split(",")}
            check_int8("draft-", native=self.native, fused=self.fused, dtype=self.dtype, devices=devices)
        return self


def load_verifier(settings: TargetWorkerSettings, report: Callable[[str], None]) -> Verifier:
    """Build the backend, and report the phases. Runs on the model thread."""
    with importing(report):
        from target_worker.loading import load_pair, load_target
        from target_worker.verifier import Verifier

    options, draft = EngineOptions.of(settings), settings.draft_options
    if draft is None:
        return Verifier(load_target(options, settings.startup_cache, report))
    target, _ = load_pair(options, draft, settings.draft_kv_memory, settings.startup_cache, report)
    return Verifier(target)


def check_settings(settings: TargetWorkerSettings) -> None:
    """Raise InvalidOptionError for settings that cannot work, in the first second."""
    options, draft = EngineOptions.of(settings), settings.draft_options
    check_options(options)
    if draft is not None:
        check_options(draft, DRAFT_NAMES)
        check_same_tokenizer(options, draft)


def main() -> None:
    settings = TargetWorkerSettings.load(PROGRAM)
    options = EngineOptions.of(settings)
    configure_logging(settings.log_level, settings.log_format, settings.log_name or PROGRAM)
    with naming(PROGRAM, "", InvalidOptionError):
        check_settings(settings)
    if settings.node_rank > 0:
        from specpool.engine.startup.follower import run_node

        run_node(PROGRAM, options)
    register = pb_grpc.add_TargetWorkerServiceServicer_to_server
    load = partial(load_verifier, settings)
    run_worker(PROGRAM, settings, load, SERVICE, register, TargetWorkerServicer, (UnsupportedModelError,))


if __name__ == "__main__":
    main()

"""The common part of the fake workers: a real gRPC server with knobs for faults."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specpool.protocol.rounds import ItemStatus
from specpool.rpc.status import ANSWERED
from specpool.testing.fake_caches import PAGE_SIZE, FakeCaches
from specpool.testing.fake_grammars import VOCAB_SIZE
from specpool.v1 import common_pb2

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)

Key = tuple[str, int]
"""A coordinator and its id of a sequence."""


class FakeWorker(FakeCaches):
    """A worker with knobs for faults."""

    model = "fake"
    """Name of the model."""
    max_rounds_ahead = max_branches = 0
    """See `WorkerLoad`."""
    _interceptors: Sequence[Any] = ()

    def __init__(
        self,
        slots: int = 16,
        max_model_len: int = 4096,
        fingerprint: str = "fake",
        device: str = "cpu",
        pass_seconds: Callable[[int], float] | None = None,
        notes: Sequence[str] = (),
        rank_devices: Sequence[str] = (),
        kv_positions: int = 0,
        supports_grammars: bool = find_spec("llguidance") is not None,
        is_recurrent: bool = False,
    ) -> None:
        """`pass_seconds`: duration of a pass with a number of new tokens; None: no delay.

        `notes`: notes about the model. `rank_devices`: devices of a sharded worker's ranks, two or more.
        `kv_positions`: capacity of the cache; 0: only `slots` limits it.
        `supports_grammars`: whether to follow grammars, which needs llguidance. `is_recurrent`: see `FakeCaches`.
        """
        super().__init__(slots, kv_positions, is_recurrent=is_recurrent)
        self.supports_grammars = supports_grammars
        self.grammars: dict[Key, tuple[str, int]] = {}
        """Grammar and prompt length of each constrained sequence."""
        self.notes, self.rank_devices = notes, rank_devices
        self.max_model_len, self.fingerprint, self.device = max_model_len, fingerprint, device
        self.pass_seconds = pass_seconds
        self.busy = False
        """Whether a round is running."""
        self.yielded: dict[Key, tuple[int, list[int]]] = {}
        """Last round of each sequence that yielded tokens, and the tokens."""
        self.calls = 0
        self.forget_every = 0
        """Loses all caches, like a restart, every `forget_every` rounds. 0: never."""
        self.fail_next: list[grpc.StatusCode] = []
        """Status codes with which the worker ends the next rounds."""
        self.loading = False
        """Whether health checks report NOT_SERVING from the next start on, until `loaded` is called."""
        self.instance_id = uuid.uuid4().hex
        """Id of the process; new after each start. Part of every answer."""
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Start serving. Return the address."""
        self.instance_id = uuid.uuid4().hex
        self._server = grpc.aio.server(interceptors=self._interceptors, options=[("grpc.so_reuseport", 0)])
        self._register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.NOT_SERVING if self.loading else status.SERVING)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def loaded(self) -> None:
        """End the loading: health checks report SERVING."""
        self.loading = False
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Stop at once, like a killed process, and lose all caches."""
        if self._server is not None:
            await self._server.stop(None)
        self.forget()  # after the stop: a running round may still add to the caches

    @property
    def weights_fingerprint(self) -> str:
        """Fingerprint of weights and logits; empty: unknown."""
        return ""

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def WatchStartup(
        self, request: common_pb2.WatchStartupRequest, context: Any
    ) -> AsyncIterator[common_pb2.WatchStartupResponse]:
        """End at once: the fake has no phases."""
        return
        yield

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        """Describes the fake."""
        return common_pb2.GetWorkerInfoResponse(
            instance_id=self.instance_id,
            model=common_pb2.ModelInfo(
                model=self.model,
                architecture="fake",
                dtype="float32",
                activations="float32",
                device=self.device,
                vocab_size=VOCAB_SIZE,
                max_model_len=self.max_model_len,
                tokenizer_fingerprint=self.fingerprint,
                equivalence=common_pb2.EQUIVALENCE_BITWISE,
                notes=self.notes,
                tensor_parallel=len(self.rank_devices) or 1,
                tensor_parallel_sums="whole" if self.rank_devices else "",
                weights_fingerprint=self.weights_fingerprint,
                numerics_fingerprint=self.weights_fingerprint,
            ),
            load=common_pb2.WorkerLoad(
                slots_total=self.slots,
                slots_in_use=len(self.caches),
                kv_positions_total=self.kv_positions,
                kv_positions_free=self.free_pages * PAGE_SIZE,
                kv_positions_multiple=PAGE_SIZE,
                max_rounds_ahead=self.max_rounds_ahead,
                max_branches=self.max_branches,
                supports_grammars=self.supports_grammars,
                ranks=[common_pb2.RankMemory(device=device) for device in self.rank_devices],
            ),
            costs=common_pb2.StepCosts(rows=MEASURED_ROWS, seconds=map(self.pass_seconds, MEASURED_ROWS))
            if self.pass_seconds is not None
            else None,
        )

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:
        """Free sequences."""
        keys = [(request.coordinator_id, sequence_id) for sequence_id in request.sequence_ids]
        if request.all:
            keys = [key for key in self.caches if key[0] == request.coordinator_id]
        released = sum(map(self.release, keys))
        return common_pb2.ReleaseResponse(released=released, instance_id=self.instance_id)

    def forget(self) -> None:
        """Lose all caches, like a restart."""
        super().forget()
        self.yielded.clear()

    async def _begin_round(self, context: Any, passes: Iterable[int]) -> None:
        """Wait for the duration of the passes; fails on demand. `passes`: number of new tokens per pass."""
        await self._run(passes)
        self._count_round()
        if self.fail_next:
            await context.abort(self.fail_next.pop(0), "told to fail", (ANSWERED,))

    async def _run(self, passes: Iterable[int]) -> None:
        if self.pass_seconds is not None:
            self.busy = True
            await asyncio.sleep(sum(map(self.pass_seconds, passes)))
            self.busy = False

    def _count_round(self) -> None:
        self.calls += 1
        if self.forget_every and self.calls % self.forget_every == 0:
            self.forget()

    def _num_drafted(self, item: Any) -> int:
        """Positions that an item needs for draft tokens."""
        raise NotImplementedError

    def _realign(self, key: Key, item: Any) -> tuple[Any, int]:
        """Return the status of an item, and the number of tokens found in the prefix cache."""
        status, prefix_length = self.realign(
            key, item, item.base_length + len(item.token_ids) + self._num_drafted(item)
        )
        if status is ItemStatus.OK and item.HasField("sampling"):
            grammar = item.sampling.grammar if self.supports_grammars else ""
            self.grammars[key] = grammar, item.sampling.prompt_length
        return common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}"), prefix_length

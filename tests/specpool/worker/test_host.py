"""The host of a worker's backend: leases of coordinators, and errors that end the process."""

import asyncio
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specpool.engine.cache.slots import SlotTable
from specpool.protocol.errors import InvalidArgumentError, UnavailableError
from specpool.protocol.rounds import ItemStatus, SequenceItem
from specpool.worker.backend import DeviceFailedError
from specpool.worker.host import WorkerHost
from specpool.worker.round_merging import Round, Work

LEASE_SECONDS = 10.0
NO_MEMORY = [
    MemoryError(),
    ImportError("_lib.so: failed to map segment from shared object"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("std::bad_alloc"),
]
BROKEN_DEVICE = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:93, unhandled cuda error"),
    torch.cuda.CudaError.__new__(torch.cuda.CudaError, "unspecified launch failure (719)"),  # `__init__` needs CUDA
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA driver error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]
NO_DEVICE_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please'),
]
ABOUT_THE_WORK = [
    ValueError("CUDA error: said the client"),
    InvalidArgumentError("items[0]", "CUDA error: out of memory"),
    RuntimeError("the client said: CUDA error: an illegal memory access"),
    RuntimeError("the client said: DefaultCPUAllocator: can't allocate memory"),
    ModuleNotFoundError("No module named 'an_extra'"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ZeroDivisionError(),
]


@pytest.mark.parametrize("fails", [False, True])
async def test_work_longer_than_the_lease_keeps_its_sequences(fails: bool) -> None:
    clock = SimpleNamespace(now=0.0)
    slots = SlotTable(4)
    slots.load = slots.info = lambda: None  # type: ignore[attr-defined]
    slots.carried_draft = None  # type: ignore[attr-defined]
    host = WorkerHost(lambda report: slots, lambda: clock.now)  # type: ignore[arg-type, return-value]
    await host.load()

    def work(table: SlotTable) -> None:
        assert table.realign(("slow", 1), 1, SequenceItem(1, 0, (0,)), 1) is ItemStatus.OK
        clock.now += 2 * LEASE_SECONDS
        if fails:
            raise ZeroDivisionError

    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                await host.run(work, "slow")
        else:
            await host.run(work, "slow")
        assert await host.run(lambda table: table.expire(clock.now, LEASE_SECONDS)) == 0
        clock.now += 2 * LEASE_SECONDS
        assert await host.run(lambda table: table.expire(clock.now, LEASE_SECONDS)) == 1
    finally:
        host.close()


async def loaded_host(shrinks: int = 0) -> tuple[WorkerHost, list[str]]:
    """Return a host whose passes can shrink `shrinks` times, and the list of reasons given to `on_failure`."""
    slots, reasons, left = SlotTable(4), list[str](), [True] * shrinks
    slots.load = slots.info = lambda: None  # type: ignore[attr-defined]
    slots.max_num_batched_tokens, slots.realign_ns, slots.draft_ns, slots.carried_draft = 64, 0, 0, None  # type: ignore[attr-defined]
    slots.shrink_passes = lambda: bool(left) and left.pop()  # type: ignore[attr-defined]
    host = WorkerHost(lambda report: slots)  # type: ignore[arg-type, return-value]
    host.on_failure = reasons.append
    await host.load()
    return host, reasons


def failing(*errors: Exception) -> Callable[[Any], str]:
    """Return work that raises these errors, one per call, and then succeeds."""
    left = list(errors)

    def work(backend: Any) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return work


@pytest.mark.parametrize("error", [*NO_MEMORY, *BROKEN_DEVICE, *NO_DEVICE_MEMORY], ids=repr)
@pytest.mark.parametrize("is_round", [False, True])
async def test_a_failure_of_the_device_or_of_memory_ends_the_process(error: Exception, is_round: bool) -> None:
    host, reasons = await loaded_host()
    call: Any = host.run(failing(error), "any")
    if is_round:
        call.close()
        round_ = Round("any", SimpleNamespace(), lambda: Work(1))
        call = host.serve_round(round_, "a round", lambda requests, backend: failing(error)(backend))
    try:
        with pytest.raises(UnavailableError):
            await call
        (reason,) = reasons
        assert str(error).partition("\n")[0] in reason
    finally:
        host.close()


@pytest.mark.parametrize("error", ABOUT_THE_WORK, ids=repr)
async def test_an_error_of_the_work_fails_only_the_work(error: Exception) -> None:
    host, reasons = await loaded_host()
    try:
        with pytest.raises(type(error)):
            await host.run(failing(error), "any")
        assert await host.run(failing(), "any") == "done"
        assert reasons == []
    finally:
        host.close()


@pytest.mark.parametrize("error", NO_DEVICE_MEMORY, ids=repr)
async def test_work_without_device_memory_is_repeated_with_smaller_passes(error: Exception) -> None:
    host, reasons = await loaded_host(shrinks=2)
    try:
        assert await host.run(failing(error, error), "any") == "done"
        assert reasons == []
        with pytest.raises(UnavailableError):
            await host.run(failing(error), "any")
        assert len(reasons) == 1
    finally:
        host.close()


async def test_merged_rounds_without_device_memory_are_served_alone() -> None:
    host, reasons = await loaded_host()
    tracebacks: list[bool] = []
    holding = threading.Event()

    def serve(requests: list[Any], backend: Any) -> list[Any]:
        if len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        tracebacks.append(sys.exception() is not None)  # it would keep tensors alive
        return requests

    rounds = [Round(name, name, lambda: Work(1)) for name in "ab"]
    held = asyncio.create_task(host.run(lambda backend: holding.wait()))
    try:
        serving = [asyncio.create_task(host.serve_round(round_, "a round", serve)) for round_ in rounds]
        while host.waiting < 2:  # noqa: ASYNC110 - another thread takes them
            await asyncio.sleep(0)
        holding.set()
        assert [result for result, _ in await asyncio.gather(*serving)] == ["a", "b"]
        assert (reasons, tracebacks) == ([], [False, False])
        await held
    finally:
        holding.set()
        host.close()


@pytest.mark.parametrize("error", [*BROKEN_DEVICE, *NO_DEVICE_MEMORY], ids=repr)
@pytest.mark.parametrize("is_described", [False, True])
async def test_a_device_failure_while_loading_is_not_a_refusal(error: Exception, is_described: bool) -> None:
    class UnsupportedModelError(Exception):
        """Would end the process for good."""

    def fail(*_: Any) -> Any:
        raise UnsupportedModelError("model cannot be loaded: why") from error

    host = WorkerHost((lambda report: SimpleNamespace(info=fail)) if is_described else fail)  # type: ignore[arg-type, return-value]
    with pytest.raises(DeviceFailedError, match="model cannot be loaded: why"):
        await host.load()
    host.close()


async def test_the_death_of_the_model_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host, reasons = await loaded_host()
    died = threading.Event()
    host.on_failure = lambda reason: (reasons.append(reason), died.set())  # type: ignore[func-returns-value, assignment]
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setattr("specpool.worker.model_thread.WorkItem.run", lambda item: 1 / 0)
    call = asyncio.create_task(host.run(failing(), "any"))
    await asyncio.to_thread(died.wait, 60)
    assert "model thread has died" in reasons[0]
    call.cancel()

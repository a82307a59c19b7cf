"""`specpool plan`: measures a pair for a minute and predicts its speed by batch size and draft length."""

import json
import sys
from typing import Any

import grpc
from rich.console import Console

from specpool.client.failures import failure
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_same_tokenizer
from specpool.environment.extras import explain_missing
from specpool.planning.plan import Plan, Terms, make_plan
from specpool.planning.plausibility import ImplausibleTimesError
from specpool.planning.prediction import Acceptance, Model, constant_acceptance
from specpool.planning.report import as_json, helm_values, plan_figure
from specpool.planning.settings import OTHER_TOKENIZER, PROGRAM, PlanSettings
from specpool.planning.tables import show
from specpool.protocol.responses import InvalidResponseError, read_worker_info
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.rpc.security.channel import Connector
from specpool.v1 import common_pb2, draft_worker_pb2_grpc, target_worker_pb2_grpc

WIDTH = 120
"""Columns of the tables where stderr is not a terminal."""
WORKER_TIMEOUT_SECONDS = 5.0


class UnusableWorkerError(Exception):
    """A running worker is unreachable or unsuitable for a plan; the message is one line."""


def main(arguments: list[str] | None = None) -> None:
    settings = PlanSettings.load(PROGRAM, arguments)
    configure_logging(settings.log_level)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    if settings.output is not None and settings.values_file is None:
        with naming(PROGRAM, "output", OSError):
            settings.output.mkdir(parents=True, exist_ok=True)
    try:
        plan = plan_of(settings, console)
    except ImplausibleTimesError as error:
        reason = f"measured times contradict each other: {error}"
        sys.exit(f"{PROGRAM}: no recommendation, because {reason}. {_advice(settings)}")
    show(plan, console)
    result = json.dumps(as_json(plan))
    with naming(PROGRAM, "output", OSError):
        if settings.values_file is not None:
            settings.values_file.write_text(helm_values(plan))
        elif settings.output is not None:
            (settings.output / "plan.json").write_text(result + "\n")
            plan_figure(plan).savefig(settings.output / "plan.png", dpi=110)
    print(result)


def _advice(settings: PlanSettings) -> str:
    if settings.target_address is not None:
        return "The worker was measured while its machine was busy; restart it with --no-startup-cache when idle"
    return "Other programs keep this machine busy: stop them, reduce --threads, or try again later"


def plan_of(settings: PlanSettings, console: Console) -> Plan:
    """Plan for running workers, or measure the models here first."""
    if settings.target_address is not None:
        target, drafts = running_models(settings)
    else:
        if (missing := explain_missing("worker")) is not None:
            sys.exit(f"{PROGRAM}: {missing}; planning for running workers needs less")
        with naming(PROGRAM, "", InvalidOptionError):
            check_models(settings)
        from specpool.planning.measuring import measure_pair  # imports torch, which running workers do not need

        target, drafts = measure_pair(settings, console)
    terms = Terms(
        batches=settings.batches,
        max_k=settings.max_num_speculative_tokens,
        exchange_seconds=settings.exchange_seconds,
        shared=settings.one_device,
        positions=settings.sequence_positions,
        throughput=settings.throughput,
        targets=settings.targets,
        drafts=settings.drafts,
        concurrency=settings.concurrency,
    )
    return make_plan(target, drafts, terms)


def check_models(settings: PlanSettings) -> None:
    """Reject invalid devices and models before importing torch. Raises InvalidOptionError, which names the setting."""
    target = EngineOptions(
        model=settings.target or EMBEDDED_TARGET, device=settings.device, max_model_len=settings.max_model_len
    )
    check_options(target, {"model": "target"})
    for model in settings.draft or ([EMBEDDED_DRAFT] if settings.target is None else []):
        draft = target.model_copy(
            update={"model": model, "target_model": target.model, "device": settings.draft_device}
        )
        check_options(draft, {"model": "draft", "device": "draft_device"})
        check_same_tokenizer(target, draft, OTHER_TOKENIZER)


def running_models(settings: PlanSettings) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    """Describe the models of running workers, with the acceptance rate from the settings."""
    assert settings.target_address is not None
    assert settings.acceptance is not None
    with naming(PROGRAM, "target-address", UnusableWorkerError):
        connector = Connector(settings.target_address, **settings.security)
        info = _worker_info(connector, target_worker_pb2_grpc.TargetWorkerServiceStub)
        target = _model_of(connector.address, info)
        if settings.draft_address is None:
            if info.draft is None:
                raise UnusableWorkerError(f"{connector.address} carries no draft; give the address of a draft worker")
            draft = _model_of(connector.address, info.draft)
    with naming(PROGRAM, "draft-address", UnusableWorkerError):
        if settings.draft_address is not None:
            connector = Connector(settings.draft_address, **settings.security)
            info = _worker_info(connector, draft_worker_pb2_grpc.DraftWorkerServiceStub)
            draft = _model_of(connector.address, info)  # any tokenizer: the given rate already covers translation
    return target, [(draft, constant_acceptance(settings.acceptance, settings.max_num_speculative_tokens))]


def _model_of(address: str, info: WorkerInfo) -> Model:
    """Return the model that this worker runs, with the costs that it measured at startup."""
    if len(info.step_seconds) < 2:
        raise UnusableWorkerError(f"{address}: the worker has not measured its passes")
    if info.ranks:
        reason = f"its model is sharded over {len(info.ranks)} ranks; plans support workers with one device"
        raise UnusableWorkerError(f"{address}: {reason}")
    return Model.of(info)


def _worker_info(connector: Connector, make_stub: Any) -> WorkerInfo:
    with connector.open_blocking() as channel:
        stub: Any = make_stub(channel)
        try:
            request = common_pb2.GetWorkerInfoRequest()
            return read_worker_info(stub.GetWorkerInfo(request, timeout=WORKER_TIMEOUT_SECONDS))
        except grpc.RpcError as error:
            reason = " ".join(str(failure(error, connector)).split())
            raise UnusableWorkerError(f"{connector.address}: {reason}") from None
        except InvalidResponseError as error:
            raise UnusableWorkerError(f"{connector.address}: {error}") from None


if __name__ == "__main__":
    main()

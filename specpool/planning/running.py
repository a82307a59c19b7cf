"""Models of running workers, from what each worker measured when it started. Needs no torch."""

from specpool.planning.capacity import Memory
from specpool.planning.plan import Acceptance, Model, constant
from specpool.planning.settings import PROGRAM, PlanSettings
from specpool.planning.worker_info import NoDescriptionError, worker_info
from specpool.protocol.responses import read_step_costs
from specpool.rpc.config.settings import naming
from specpool.rpc.security.channel import Connector


def described(settings: PlanSettings) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    """The target, and the draft with the acceptance that the settings give."""
    models = []
    for name, drafts in (("target-address", False), ("draft-address", True)):
        address = settings.draft_address if drafts else settings.target_address
        assert address is not None
        with naming(PROGRAM, name, NoDescriptionError):
            models.append(_described(Connector(address, **settings.security), drafts))
    target, draft = models
    if target.tokenizer_fingerprint != draft.tokenizer_fingerprint:
        with naming(PROGRAM, "draft-address", NoDescriptionError):
            raise NoDescriptionError(f"{draft.name} has another tokenizer than {target.name}")
    assert settings.acceptance is not None
    return target, [(draft, constant(settings.acceptance, settings.longest))]


def _described(connector: Connector, drafts: bool) -> Model:
    """The model of one worker. NoDescriptionError."""
    response = worker_info(connector, drafts)
    costs, model, load = read_step_costs(response), response.model, response.load
    if len(costs.step_seconds) < 2:
        raise NoDescriptionError(f"{connector.address}: it has not measured its passes")
    if load.ranks:
        reason = f"its model is divided among {len(load.ranks)} ranks; plans are for workers with one device"
        raise NoDescriptionError(f"{connector.address}: {reason}")
    return Model(
        name=model.model,
        device=model.device,
        dtype=model.dtype,
        parameters=model.parameters,
        memory=Memory(
            weights=load.weight_bytes,
            activations=load.activation_bytes,
            kv_per_position=load.kv_bytes_per_token,
            positions=load.kv_positions_total or load.slots_total * model.max_model_len,
            multiple=max(1, load.kv_positions_multiple),
            max_model_len=model.max_model_len,
        ),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        step_seconds=costs.step_seconds,
        step_cached=costs.step_cached,
        seconds_per_cached=costs.seconds_per_cached,
        max_rows=costs.max_rows,
    )

"""Engine options of a target worker, which may carry a draft."""

from typing import Any, Self

from pydantic import ByteSize, Field, model_validator

from specpool.engine.config.options import INT8, MTP, MTP_NEEDS_FUSED, Activations, EngineOptions, check_int8

ENGINE: dict[str, Any] = EngineOptions.model_fields
RANKS = {"tensor_parallel", "tensor_parallel_sums", "nnodes", "node_rank", "master_addr", "master_port"}
NOT_SHARED = RANKS | {"model", "revision", "target_model", "device", "weights", "activations"}
"""Options that the draft does not take from its target. Rank 0 runs the draft unsharded."""


class TargetOptions(EngineOptions):
    """Engine options of a target, and of the draft that it carries."""

    draft: str | None = Field(
        None,
        min_length=1,
        description='draft model for the worker to carry: hub id, folder or GGUF file, or "mtp" for the target\'s own '
        "MTP layer. It runs on the target's device and shares the target's memory_limit or memory_budget; "
        "default: none",
    )
    draft_revision: str | None = ENGINE["revision"]
    draft_activations: Activations = ENGINE["activations"]
    draft_kv_memory: ByteSize | None = Field(
        None,
        description="size of the carried draft's KV cache and recurrent states; default: as many positions as "
        "the target's cache",
    )

    @property
    def draft_options(self) -> EngineOptions | None:
        """The draft's options; None: the worker carries no draft."""
        if self.draft is None:
            return None
        options = EngineOptions.of(self).model_dump(exclude=NOT_SHARED)
        if self.draft_kv_memory is not None:
            options = {name: value for name, value in options.items() if name not in self.memory_limits}
            options["kv_memory"] = self.draft_kv_memory
        is_mtp = self.draft == MTP
        return EngineOptions(
            **options,
            model=self.draft,
            revision=self.revision if is_mtp else self.draft_revision,
            target_model=self.model if self.revision is None or is_mtp else None,
            device=self.device.split(",")[0].strip(),
            activations=self.draft_activations,
        )

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        names = "draft_revision", "draft_activations", "draft_kv_memory"
        given = [name for name in names if getattr(self, name) not in (None, "auto")]
        if given and self.draft is None and self.node_rank == 0:  # nodes may share their other settings
            raise ValueError(f"{given[0]} needs --draft")
        if self.draft == MTP and self.draft_revision is not None:
            raise ValueError("draft_revision: draft mtp is in the target's checkpoint; set revision")
        if self.draft == MTP and not self.fused:
            raise ValueError(MTP_NEEDS_FUSED)
        if self.draft is not None and self.node_rank > 0:
            raise ValueError(f"--draft must be given to node 0 only, and this is node {self.node_rank}")
        if self.draft_activations == INT8:
            devices = {"--device": self.device.split(",")}
            check_int8(
                "draft-", shares_flags=True, native=self.native, fused=self.fused, dtype=self.dtype, devices=devices
            )
        return self

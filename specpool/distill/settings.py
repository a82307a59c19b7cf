"""Settings of `specpool distill`, checked without importing torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from specpool.engine.config.options import MTP, EngineOptions
from specpool.engine.models.embedded_pair import EMBEDDED_TARGET, draft_weights
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.rpc.config.settings import UINT32_MAX, LogLevel, Settings, naming

PROGRAM = "specpool distill"
INT8_FILE = "draft.safetensors"
CALIBRATION_DIALOGUES = 512
"""Maximum number of dialogues that calibrate the rounding to 4 bits."""
NUMBERS = r"^\d{1,4}(,\d{1,4})*$"

DraftKind = Literal["causal", "feature"]
Precision = Literal["float32", "bfloat16"]


class DistillSettings(Settings):
    """Train a small draft on dialogues that its target generates, and round its weights to 4 bits."""

    target: str | None = Field(None, description="folder of the target; default: the embedded one")
    output: Path = Field(Path("draft"), description="folder for dialogues, checkpoint and result")
    dialogues: int = Field(
        20_000, ge=64, description="number of dialogues to generate, at least 64; saved in files of 16"
    )
    recording: Path | None = Field(
        None,
        alias="from",
        description="train on answers that a coordinator recorded in this directory, instead of generating dialogues; "
        "--dialogues limits their number, newest first",
    )
    held_out: int = Field(
        200,
        ge=8,
        description="dialogues held out from training for evaluation; at least 8, fewer than --dialogues",
    )
    max_sequences: int | None = Field(
        None, ge=1, description="dialogues generated at a time; default: 48, or up to 2,048 on a GPU"
    )
    initial: Path | None = Field(
        None,
        description="draft.safetensors to start from; its layers and tokens replace --layers and --output-tokens. "
        "A feature draft can start from a causal one. Default with --from and the embedded target, unless other "
        "kind, layers or tokens are given: the embedded draft",
    )
    kind: DraftKind | None = Field(
        None,
        description="causal, or feature: a draft that reads the target's hidden states; default: the kind of "
        "--initial, or causal",
    )
    layers: str | None = Field(
        None,
        pattern=NUMBERS,
        description="indexes of the target's layers to start from; default: 0, 1 and the last, or the last for feature",
    )
    feature_layers: str | None = Field(
        None,
        pattern=NUMBERS,
        description="numbers of the target's layers after which a feature draft reads states; "
        "default: a third, two thirds and all of them",
    )
    output_tokens: int = Field(
        16_384, ge=256, description="number of tokens that the draft can propose (the most frequent ones), at least 256"
    )
    epochs: float = Field(
        4.0,
        ge=0,
        le=10_000,
        description="passes over the dialogues; 0: only round --initial, or the draft in --output, to 4 bits",
    )
    batch_tokens: int = Field(4096, ge=64, description="tokens per training step, at least 64")
    peak_rate: float = Field(5e-4, gt=0, le=1, description="maximum learning rate")
    evaluate_every: int = Field(200, ge=1, description="training steps between evaluations")
    precision: Precision = Field(
        "float32", description="float32 or bfloat16, which is several times faster with AMX or on a GPU"
    )
    seed: int = Field(0, ge=0, le=UINT32_MAX, description="seed of the dialogues and of the training order")
    device: str = Field("cpu", description="device of target and draft")
    log_level: LogLevel = Field("warning", description="minimum level of logged messages")

    @property
    def draft_to_continue(self) -> Path | None:
        """The trained draft to start from. With 0 epochs, it defaults to the draft of an earlier run.

        Raises OSError if the default is the embedded draft, and the installation lacks it.
        """
        if self.initial is not None:
            return self.initial
        if self.epochs == 0 and (self.output / INT8_FILE).is_file():
            return self.output / INT8_FILE
        starts_fresh = self.kind == "causal" or self.model_fields_set & {"layers", "feature_layers", "output_tokens"}
        return None if self.recording is None or self.target is not None or starts_fresh else draft_weights()

    @property
    def num_dialogues(self) -> int:
        """Number of dialogues to generate. With 0 epochs, only calibration and evaluation need them."""
        needed = self.held_out + CALIBRATION_DIALOGUES
        return self.dialogues if self.epochs else min(self.dialogues, needed)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target == MTP:
            raise ValueError("target: mtp is a draft")
        if self.epochs == 0 and self.initial is None and not (missing := self.output / INT8_FILE).is_file():
            raise ValueError(f"epochs: 0 only rounds a draft, but {missing} does not exist; give --initial")
        if self.feature_layers is not None and self.kind != "feature":
            raise ValueError("feature_layers: needs --kind feature")
        if self.held_out >= self.dialogues:
            raise ValueError(f"held_out: {self.held_out} is not below the number of dialogues, {self.dialogues}")
        return self


def load_settings(arguments: list[str] | None = None) -> DistillSettings:
    """Load the settings and check device and target. Invalid ones end the process with one line and status 2."""
    settings = DistillSettings.load(PROGRAM, arguments)
    with naming(PROGRAM, "", InvalidOptionError):
        options = EngineOptions(model=settings.target or EMBEDDED_TARGET, device=settings.device)
        check_options(options, {"model": "target"})
    return settings

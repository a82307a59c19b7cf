"""Generates the dialogues of `specpool distill`, in files, so that an interrupted run can be resumed."""

import gc
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specpool.distill.examples import Dialogues
from specpool.distill.questions import ChatTemplate, Limits, Questions
from specpool.distill.settings import PROGRAM, DistillSettings
from specpool.distill.static_decoder import bytes_per_sequence, decodes_like_llama
from specpool.distill.static_writer import StaticWriter
from specpool.distill.writer import Writer
from specpool.engine.config.devices import pick_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.config import load_config
from specpool.engine.models.tokenizer import load_tokenizer, tokenizer_files
from specpool.engine.models.weights import check_complete, read_weights
from specpool.engine.startup.loading import load_engine
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.rpc.config.settings import naming

console = Console()

DIALOGUES_PER_FILE = 256
LIMITS = Limits()
SEQUENCES_ON_CPU, MAX_SEQUENCES_ON_GPU = 48, 2048
"""Default number of dialogues generated at a time. On a GPU: as many as fit into memory, up to the maximum."""
LOST_SHARE = 8
"""Minimum number of dialogues for each that is generated at a time."""
CACHE_SHARE = 0.7
"""Share of a GPU's free memory to use for KV caches."""


def progress_bar() -> Progress:
    """A progress bar with a count and the remaining time."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def generate_dialogues(settings: DistillSettings, target: str) -> None:
    count = -(-settings.dialogues // DIALOGUES_PER_FILE)
    files = [settings.output / f"dialogues-{number:04}.safetensors" for number in range(count)]
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    if not missing:
        return
    with naming(PROGRAM, "target", OSError, UnsupportedModelError, ValueError):
        # Dialogues in progress span files, so a resumed run continues with other dialogues.
        writer = _writer(settings, target, settings.seed + 1_000_003 * missing[0])
    with progress_bar() as progress:
        task = progress.add_task("generating", total=count * DIALOGUES_PER_FILE)
        progress.advance(task, (count - len(missing)) * DIALOGUES_PER_FILE)
        for number in missing:
            finished = []
            for example in writer.write(DIALOGUES_PER_FILE):
                finished.append(example)
                progress.advance(task)
            Dialogues.of(finished).save(files[number])
    # The training needs the memory of the caches, which a reference cycle would keep.
    del writer
    gc.collect()
    torch.cuda.empty_cache()


def dialogue_files(settings: DistillSettings) -> list[Path]:
    return sorted(settings.output.glob("dialogues-*.safetensors"))


def read_target(target: str, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The target on a device, with dequantized weights. `dtype`: default: as stored. UnsupportedModelError."""
    config = load_config(EngineOptions(model=target))
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    model, report = read_weights(target, config, device, dtype or stored)
    check_complete(report)
    model.eval()
    return model


def _writer(settings: DistillSettings, target: str, seed: int) -> Writer | StaticWriter:
    writer = static_writer(settings, target, seed) if pick_device(settings.device).type == "cuda" else None
    return writer or _engine_writer(settings, target, seed)


def static_writer(settings: DistillSettings, target: str, seed: int) -> StaticWriter | None:
    """A writer for a GPU; None if `StaticDecoder` does not reproduce the target's logits, or a graph cannot hold it."""
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else None
    model = read_target(target, pick_device(settings.device), dtype)
    if not decodes_like_llama(model):
        return None
    tokenizer = load_tokenizer(target)
    questions = _questions(tokenizer, tokenizer_files(tokenizer, model), seed)
    # Dialogues that have not ended at the end are lost, most of them long ones: they must be few.
    sequences = settings.max_sequences or min(_fitting(model, questions), settings.dialogues // LOST_SHARE)
    try:
        return StaticWriter(model, questions, seed, sequences)
    except RuntimeError as error:
        console.print(f"generating with the engine, which is slower: {first_line(error)}")
        return None


def _engine_writer(settings: DistillSettings, target: str, seed: int) -> Writer:
    tokenizer = load_tokenizer(target)
    # The length of dialogues depends on the template, but not on the tokens that end a turn.
    length = Questions(ChatTemplate.of(tokenizer, frozenset()), seed, LIMITS).max_length
    slots = settings.max_sequences or SEQUENCES_ON_CPU
    options = EngineOptions(model=target, device=settings.device, max_sequences=slots, max_model_len=length)
    engine = load_engine(options, exact=False)
    return Writer(engine, _questions(tokenizer, engine.loaded.tokenizer, seed), seed)


def _questions(tokenizer: PreTrainedTokenizerBase, files: TokenizerFiles, seed: int) -> Questions:
    return Questions(ChatTemplate.of(tokenizer, frozenset(files.eos_token_ids)), seed, LIMITS)


def _fitting(model: PreTrainedModel, questions: Questions) -> int:
    """Number of dialogues whose caches fit into the GPU's free memory."""
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(1, min(MAX_SEQUENCES_ON_GPU, int(CACHE_SHARE * free / bytes_per_sequence(model, questions.max_length))))

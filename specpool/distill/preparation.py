"""Generates the dialogues of `specpool distill`, in files, so that an interrupted run can be resumed."""

import gc
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specpool.distill.examples import Dialogues, Example
from specpool.distill.progress import console, counting
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
from specpool.protocol.worker_info import readable_name
from specpool.rpc.config.settings import naming

DIALOGUES_PER_FILE = 16
LIMITS = Limits()
SEQUENCES_ON_CPU, MAX_SEQUENCES_ON_GPU = 48, 2048
"""Default number of dialogues generated at a time. On a GPU: as many as fit into memory, up to the maximum."""
MIN_LAG, LAG_SHARE = 128, 8
"""A dialogue may refer to answers this far before it, at least, or this share of all dialogues."""
CACHE_SHARE = 0.7
"""Share of a GPU's free memory to use for KV caches."""


def generate_dialogues(settings: DistillSettings, target: str) -> None:
    """Generate the dialogues that earlier runs have not saved."""
    files = _files(settings)
    saved = [numbers for numbers, file in files.items() if file.is_file() and _holds(file, numbers)]
    missing = [numbers for numbers in files if numbers not in saved]
    if not missing:
        return
    with naming(PROGRAM, "target", OSError, UnsupportedModelError, ValueError):
        console.print(f"loading {readable_name(target)} to generate dialogues")
        questions, writer = _writer(settings, target)
    for numbers in saved:
        for number, example in zip(numbers, Dialogues.load(files[numbers]).examples(), strict=True):
            questions.take_answer(number, example.token_ids[example.answer_start :].tolist())
    finished, shards = dict[int, Example](), list(files)
    with counting("generating", "dialogues", settings.num_dialogues, sum(map(len, saved))) as counter:
        for number, example in writer.write(chain.from_iterable(missing), lag_of(settings)):
            finished[number] = example
            counter.advance()
            numbers = shards[number // DIALOGUES_PER_FILE]
            if all(each in finished for each in numbers):
                Dialogues.of([finished.pop(each) for each in numbers]).save(files[numbers])
    # The training needs the memory of the caches, which a reference cycle would keep.
    del writer
    gc.collect()
    torch.cuda.empty_cache()


def lag_of(settings: DistillSettings) -> int:
    """How far before a dialogue the answers are that it may refer to. See `Agenda`."""
    return max(MIN_LAG, settings.dialogues // LAG_SHARE)


def _files(settings: DistillSettings) -> dict[range, Path]:
    """The files of dialogues, by the numbers of their dialogues."""
    ranges = (
        range(first, min(first + DIALOGUES_PER_FILE, settings.num_dialogues))
        for first in range(0, settings.num_dialogues, DIALOGUES_PER_FILE)
    )
    return {numbers: settings.output / f"dialogues-{index:05}.safetensors" for index, numbers in enumerate(ranges)}


def _holds(file: Path, numbers: range) -> bool:
    """Whether a file has as many dialogues. A run with fewer of them leaves a shorter last file."""
    return len(Dialogues.load(file).lengths) == len(numbers)


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


def _writer(settings: DistillSettings, target: str) -> tuple[Questions, Writer | StaticWriter]:
    check_positions(target)
    on_gpu = pick_device(settings.device).type == "cuda"
    return (static_writer(settings, target) if on_gpu else None) or _engine_writer(settings, target)


def static_writer(settings: DistillSettings, target: str) -> tuple[Questions, StaticWriter] | None:
    """A writer for a GPU; None if `StaticDecoder` does not reproduce the target's logits, or a graph cannot hold it."""
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else None
    model = read_target(target, pick_device(settings.device), dtype)
    if not decodes_like_llama(model):
        return None
    tokenizer = load_tokenizer(target)
    questions = _questions(tokenizer, tokenizer_files(tokenizer, model), settings.seed)
    sequences = settings.max_sequences or max(1, min(_fitting(model, questions), lag_of(settings) // 2))
    try:
        return questions, StaticWriter(model, questions, sequences)
    except RuntimeError as error:
        console.print(f"generating with the engine, which is slower: {first_line(error)}")
        return None


def _engine_writer(settings: DistillSettings, target: str) -> tuple[Questions, Writer]:
    tokenizer = load_tokenizer(target)
    # The length of dialogues depends on the template, but not on the tokens that end a turn.
    length = Questions(ChatTemplate.of(tokenizer, frozenset()), settings.seed, LIMITS).max_length
    slots = settings.max_sequences or min(SEQUENCES_ON_CPU, settings.num_dialogues)
    options = EngineOptions(model=target, device=settings.device, max_sequences=slots, max_model_len=length)
    engine = load_engine(options, exact=False)
    questions = _questions(tokenizer, engine.loaded.tokenizer, settings.seed)
    return questions, Writer(engine, questions)


def check_positions(target: str) -> None:
    """ValueError if the target has fewer positions than a dialogue."""
    config = load_config(EngineOptions(model=target))
    length = Questions(ChatTemplate.of(load_tokenizer(target), frozenset()), 0, LIMITS).max_length
    positions = getattr(config, "max_position_embeddings", None) or length
    if positions < length:
        raise ValueError(f"{target} has {positions} positions (max_position_embeddings); a dialogue needs {length}")


def _questions(tokenizer: PreTrainedTokenizerBase, files: TokenizerFiles, seed: int) -> Questions:
    return Questions(ChatTemplate.of(tokenizer, frozenset(files.eos_token_ids)), seed, LIMITS)


def _fitting(model: PreTrainedModel, questions: Questions) -> int:
    """Number of dialogues whose caches fit into the GPU's free memory."""
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(1, min(MAX_SEQUENCES_ON_GPU, int(CACHE_SHARE * free / bytes_per_sequence(model, questions.max_length))))

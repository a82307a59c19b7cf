"""Prepares the data of `specpool distill`: dialogues, and the target's hidden states on them. Both can be resumed."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from specpool.distill.corpus import ChatTemplate, Dialogues, Writer, concatenate
from specpool.distill.settings import PROGRAM, DistillSettings
from specpool.distill.states import has_states, write_states
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, source_of
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.rpc.config.settings import naming

console = Console()

DIALOGUES_PER_SHARD = 256


def progress_bar() -> Progress:
    """A progress bar with a count and the remaining time."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def generate_dialogues(settings: DistillSettings, target: str) -> None:
    """Write the missing files of dialogues."""
    count = -(-settings.dialogues // DIALOGUES_PER_SHARD)
    files = [settings.output / f"dialogues-{number:04}.safetensors" for number in range(count)]
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    if not missing:
        return
    with naming(PROGRAM, "target", OSError, UnsupportedModelError, ValueError):
        engine = _engine_of(settings, target)
        tokenizer = AutoTokenizer.from_pretrained(**source_of(target, None))
        template = ChatTemplate.of(tokenizer, frozenset(engine.loaded.tokenizer.eos_token_ids))
    with progress_bar() as progress:
        task = progress.add_task("generating", total=count * DIALOGUES_PER_SHARD)
        progress.advance(task, (count - len(missing)) * DIALOGUES_PER_SHARD)
        # Dialogues in progress span files, so a resumed run continues with other dialogues.
        writer = Writer(engine, template, settings.seed + 1_000_003 * missing[0])
        for number in missing:
            finished = []
            for dialogue in writer.write(DIALOGUES_PER_SHARD):
                finished.append(dialogue)
                progress.advance(task)
            concatenate(finished).save(files[number])


def generate_states(settings: DistillSettings, target: str, layers: list[int]) -> None:
    """Write the missing files of hidden states after these numbers of layers."""
    files = {file: states_file(file) for file in dialogue_files(settings)}
    missing = [file for file, states in files.items() if not has_states(states, layers)]
    if not missing:
        return
    with naming(PROGRAM, "target", OSError, UnsupportedModelError, ValueError):
        engine = _engine_of(settings, target)
        if not engine.has_states:
            raise ValueError(f"{target} cannot return hidden states")
    with progress_bar() as progress:
        for file in progress.track(missing, len(files), len(files) - len(missing), description="computing states"):
            write_states(engine, Dialogues.load(file), layers, files[file])


def dialogue_files(settings: DistillSettings) -> list[Path]:
    """All files of dialogues."""
    return sorted(settings.output.glob("dialogues-*.safetensors"))


def states_file(dialogues: Path) -> Path:
    """The file of states beside a file of dialogues."""
    return dialogues.with_name(dialogues.name.replace("dialogues", "states"))


def _engine_of(settings: DistillSettings, target: str) -> Engine:
    options = EngineOptions(
        model=target, device=settings.device, max_sequences=settings.max_sequences, max_model_len=512
    )
    return load_engine(options, exact=False)

"""`specpool distill`: trains a small draft on dialogues that its target generates, and rounds its weights to 4 bits.

Generation and training can be resumed.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from specpool.distill.corpus import ChatTemplate, Dialogues, Writer, atomic_write, concatenate
from specpool.distill.replay import REPORTED_K, agreement_rate, mean_acceptance_length
from specpool.distill.rounding import round_student
from specpool.distill.settings import PROGRAM, DistillSettings, load_settings
from specpool.distill.student import Student, check_target, check_weights, most_frequent
from specpool.distill.training import (
    Checkpoint,
    Example,
    agreement,
    batches,
    distillation_loss,
    learning_rate,
    split_examples,
)
from specpool.engine.config.devices import pick_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, source_of
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_folder import count_layers, save_draft
from specpool.engine.models.draft_weights import load_compact, load_trained, save_compact
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.weights import read_weights
from specpool.engine.startup.loading import load_engine
from specpool.engine.weights.quantized import Weight
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging

console = Console()

DIALOGUES_PER_SHARD = 256
INT8_FILE, ROUNDED_FILE = "draft.safetensors", "draft-4bit.safetensors"
CALIBRATION_DIALOGUES = 512
"""Maximum number of dialogues that calibrate the rounding to 4 bits."""
MAX_LOSS = 0.005
"""Agreement that 4-bit weights may lose compared with int8."""


def main() -> None:
    """Entry point."""
    distill(load_settings())


def distill(settings: DistillSettings) -> None:
    """Run the command. Invalid settings fail before hours of generation."""
    configure_logging(settings.log_level, follow_native=False)
    with naming(PROGRAM, "output", OSError):
        settings.output.mkdir(parents=True, exist_ok=True)
    with naming(PROGRAM, "device", UnsupportedModelError):
        pick_device(settings.device)
    with naming(PROGRAM, "target", OSError, UnsupportedModelError):
        target = settings.target or str(embedded_pair().target)
        config = load_config(EngineOptions(model=target, device=settings.device))
    layers = layers_for(settings, config)
    with naming(PROGRAM, "layers", ValueError):
        check_target(config, layers)
    with naming(PROGRAM, "initial", ValueError, OSError, SafetensorError):
        if settings.initial is not None:
            check_weights(load_trained(settings.initial), config)
    with naming(PROGRAM, "output", ValueError):
        checkpoint_of(settings, layers).check()
    generate_dialogues(settings, target)
    train(settings, target, layers)


def layers_for(settings: DistillSettings, config: PreTrainedConfig) -> list[int]:
    """Indexes of the target's layers to start from."""
    if settings.layers is not None:
        return [int(layer) for layer in settings.layers.split(",")]
    return sorted({0, min(1, config.num_hidden_layers - 1), config.num_hidden_layers - 1})


def checkpoint_of(settings: DistillSettings, layers: list[int]) -> Checkpoint:
    """The checkpoint of a draft with these settings and layers."""
    began: dict[str, Any] = {"layers": layers, "output_tokens": settings.output_tokens}
    if settings.initial is not None:
        began = {"initial": str(settings.initial.resolve())}
    return Checkpoint(settings.output / "checkpoint.pt", began)


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
    options = EngineOptions(
        model=target, device=settings.device, max_sequences=settings.max_sequences, max_model_len=512
    )
    with naming(PROGRAM, "target", OSError, UnsupportedModelError, ValueError):
        engine = load_engine(options, exact=False)
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


def train(settings: DistillSettings, target: str, layers: list[int]) -> None:
    """Train the draft, evaluate and save it periodically, and export it."""
    torch.manual_seed(settings.seed)
    files = sorted(settings.output.glob("dialogues-*.safetensors"))
    everything = [example for file in files for example in split_examples(Dialogues.load(file))]
    held_out, examples = everything[: settings.held_out], everything[settings.held_out :]
    model, _ = read_weights(target, load_config(EngineOptions(model=target)), torch.device("cpu"), torch.float32)
    student = student_of(settings, model, layers, examples).to(settings.device)
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    checkpoint = checkpoint_of(settings, layers)
    tokens = sum(len(example.token_ids) for example in examples)
    steps = max(1, int(settings.epochs * tokens / settings.batch_tokens)) if settings.epochs else 0
    step, began = checkpoint.load(student, optimizer), time.monotonic()
    rng = random.Random(settings.seed + step)
    console.print(f"{len(examples):,} dialogues, {tokens:,} tokens, {steps:,} steps, starting at {step:,}")
    with progress_bar() as progress:
        task = progress.add_task("training", total=steps, completed=step)
        while step < steps:
            for batch in batches(examples, settings.batch_tokens, rng):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, min(200, steps // 10 + 1), settings.peak_rate)
                loss = distillation_loss(student, batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                step += 1
                progress.update(task, completed=step, description=f"training, loss {loss.item():.3f}")
                if step % settings.evaluate_every == 0 or step == steps:
                    seconds = time.monotonic() - began
                    progress.console.print(f"step {step:,}, {seconds:,.0f} s: {evaluation(student, held_out)}")
                    checkpoint.save(student, optimizer, step)
                    save(settings.output / INT8_FILE, student.trained())
                if step == steps:
                    break
    export(settings, target, student, examples, held_out)


def export(
    settings: DistillSettings, target: str, student: Student, examples: list[Example], held_out: list[Example]
) -> None:
    """Save the draft in int8, in 4 bits if they hardly lower its agreement, and as a model with the smaller weights."""
    compact, rounded = settings.output / INT8_FILE, settings.output / ROUNDED_FILE
    save(compact, student.trained())
    console.print("rounding weights to 4 bits")
    save(rounded, {**student.trained(), **round_student(student, examples[:CALIBRATION_DIALOGUES])})
    before, after = (agreement_of(file, student, held_out) for file in (compact, rounded))
    lost = before - after
    change = f"agreement {after:.4f}, {before:.4f} with int8"
    if lost <= MAX_LOSS:
        console.print(f"4-bit weights: {change}")
    else:
        console.print(f"keeping int8: 4-bit weights lose more than {MAX_LOSS:.1%} ({change})")
        rounded.unlink()
    folder = settings.output / "model"
    save_draft(folder, target, load_compact(rounded if lost <= MAX_LOSS else compact))
    console.print(f"specpool up --target {target} --draft {folder}", soft_wrap=True)  # a line to copy


def save(file: Path, trained: Mapping[str, Weight]) -> None:
    """Write a draft's weights, atomically."""
    with atomic_write(file) as partial:
        save_compact(partial, trained)


def agreement_of(file: Path, student: Student, held_out: list[Example]) -> float:
    """Agreement of a saved draft with its target. The student takes over its weights."""
    student.learn(load_trained(file))
    return agreement_rate(agreement(student, held_out))


def student_of(
    settings: DistillSettings, model: PreTrainedModel, layers: list[int], examples: list[Example]
) -> Student:
    """An untrained student with the target's most frequent tokens in its output head, or the initial student."""
    if settings.initial is not None:
        trained = load_trained(settings.initial)
        student = Student(model, list(range(count_layers(trained))), trained["output_ids"].long())
        student.learn(trained)
        return student
    vocabulary = int(model.config.vocab_size)
    counts = torch.zeros(vocabulary)
    for example in examples:
        counts += torch.bincount(example.top_ids[:, 0], minlength=vocabulary)
        counts += 0.01 * torch.bincount(example.top_ids[:, 1:4].flatten(), minlength=vocabulary)
    return Student(model, layers, most_frequent(counts, min(settings.output_tokens, vocabulary)))


def evaluation(student: Student, held_out: list[Example]) -> str:
    """Agreement of the student with its target on held-out dialogues, as text."""
    agreed = agreement(student, held_out)
    lengths = ", ".join(f"{mean_acceptance_length(agreed, k):.2f}" for k in REPORTED_K)
    return f"agreement {agreement_rate(agreed):.3f}, mean acceptance length at k = 1 to 5: {lengths}"


if __name__ == "__main__":
    main()

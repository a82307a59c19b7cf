"""`specpool distill`: trains a small draft on dialogues that its target generates, and rounds its weights to 4 bits.

A draft of kind `feature` reads the target's hidden states. Generation and training can be resumed.
"""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from specpool.distill.examples import Dialogues, Example, TargetStates, atomic_write, batches
from specpool.distill.feature_student import FeatureStudent, check_feature_target
from specpool.distill.preparation import dialogue_files, generate_dialogues, read_target
from specpool.distill.progress import console, counting
from specpool.distill.recording import fingerprint_of, recorded_examples
from specpool.distill.replay import REPORTED_K, agreement_rate, mean_acceptance_length
from specpool.distill.rounding import round_student
from specpool.distill.settings import CALIBRATION_DIALOGUES, INT8_FILE, PROGRAM, DistillSettings, load_settings
from specpool.distill.student import FEATURE_LAYERS, Student, check_target, check_weights, most_frequent
from specpool.distill.training import Checkpoint, agreement, distillation_loss, drop_states, learning_rate
from specpool.engine.config.devices import pick_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_folder import count_layers, save_draft
from specpool.engine.models.draft_weights import load_compact, load_trained, save_compact
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.weights.quantized import Weight
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging

ROUNDED_FILE = "draft-4bit.safetensors"
MAX_LOSS = 0.005
"""Agreement that 4-bit weights may lose compared with int8."""
FITTED_DIALOGUES = 160
"""Dialogues for the regression that a feature draft starts from."""
UNROLLED_STEPS, UNROLLED_SHARE = 3, 0.7
"""Draft steps to unroll when training a feature draft, and the final share of training that unrolls them."""


def main(arguments: list[str] | None = None) -> None:
    distill(load_settings(arguments))


def distill(settings: DistillSettings) -> None:
    """Run the command. Invalid settings fail before hours of generation."""
    configure_logging(settings.log_level)
    with naming(PROGRAM, "output", OSError):
        settings.output.mkdir(parents=True, exist_ok=True)
    with naming(PROGRAM, "device", UnsupportedModelError):
        pick_device(settings.device)
    with naming(PROGRAM, "target", OSError, UnsupportedModelError):
        target = settings.target or str(embedded_pair().target)
        config = load_config(EngineOptions(model=target, device=settings.device))
    with naming(PROGRAM, "initial", ValueError, OSError, SafetensorError):
        if (file := settings.draft_to_continue) is not None:
            initial = load_trained(file)
            check_weights(initial, config)
            if FEATURE_LAYERS in initial and settings.kind == "causal":
                raise ValueError(f"{file} is a feature draft, which needs --kind feature")
    layers, feature_layers = layers_for(settings, config), feature_layers_for(settings, config)
    with naming(PROGRAM, "layers", ValueError):
        check_target(config, layers)
    with naming(PROGRAM, "kind", ValueError):
        if feature_layers:
            check_feature_target(config)
    with naming(PROGRAM, "feature_layers", ValueError):
        if not all(0 < layer <= config.num_hidden_layers for layer in feature_layers):
            raise ValueError(f"must be from 1 to {config.num_hidden_layers}, the number of the target's layers")
    if settings.epochs:
        with naming(PROGRAM, "output", ValueError):
            checkpoint_of(settings, layers, feature_layers).check()
    held_out, examples = dialogues_of(settings, target, config)
    if settings.epochs:
        with naming(PROGRAM, "output", ValueError):
            checkpoint_of(settings, layers, feature_layers, examples).check()
    train(settings, target, layers, feature_layers, held_out, examples)


def dialogues_of(
    settings: DistillSettings, target: str, config: PreTrainedConfig
) -> tuple[list[Example], list[Example]]:
    """Return the held-out dialogues and the training dialogues, either recorded or generated."""
    if (folder := settings.recording) is not None:
        with naming(PROGRAM, "from", OSError, ValueError):
            return recorded_examples(folder, target, config.vocab_size, settings.num_dialogues, settings.held_out)
    generate_dialogues(settings, target)
    dialogues = [example for file in dialogue_files(settings) for example in Dialogues.load(file).examples()]
    random.Random(settings.seed).shuffle(dialogues)  # files hold short dialogues first
    return dialogues[: settings.held_out], dialogues[settings.held_out :]


def layers_for(settings: DistillSettings, config: PreTrainedConfig) -> list[int]:
    """Indexes of the target's layers to start from."""
    if settings.layers is not None:
        return [int(layer) for layer in settings.layers.split(",")]
    last = config.num_hidden_layers - 1
    return [last] if settings.kind == "feature" else sorted({0, min(1, last), last})


def feature_layers_for(settings: DistillSettings, config: PreTrainedConfig) -> list[int]:
    """Numbers of the target's layers after which the draft reads states; empty for a causal draft."""
    file = settings.draft_to_continue
    if file is not None and FEATURE_LAYERS in (initial := load_trained(file)):
        layers: list[int] = initial[FEATURE_LAYERS].tolist()
        return layers
    if settings.kind != "feature":
        return []
    if settings.feature_layers is not None:
        return [int(layer) for layer in settings.feature_layers.split(",")]
    count = config.num_hidden_layers
    return sorted({-(-count // 3), -(-2 * count // 3), count})


def checkpoint_of(
    settings: DistillSettings, layers: list[int], feature_layers: list[int], examples: Sequence[Example] = ()
) -> Checkpoint:
    """Return the checkpoint of a draft with these settings, layers and recorded answers, if any."""
    began: dict[str, Any] = {"layers": layers, "output_tokens": settings.output_tokens}
    if (file := settings.draft_to_continue) is not None:
        began = {"initial": str(file.resolve())}
    if feature_layers:
        began[FEATURE_LAYERS] = feature_layers
    if settings.recording is not None and examples:
        began["answers"] = fingerprint_of(examples)
    return Checkpoint(settings.output / "checkpoint.pt", began)


def train(
    settings: DistillSettings,
    target: str,
    layers: list[int],
    feature_layers: list[int],
    held_out: list[Example],
    examples: list[Example],
) -> None:
    """Train the draft on the examples, evaluate and save it periodically, and export it."""
    torch.manual_seed(settings.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = pick_device(settings.device)
    # Without states to compute, only the draft needs the device.
    model = read_target(target, device if feature_layers else torch.device("cpu"), torch.float32)
    in_bfloat16 = settings.precision == "bfloat16"
    states = TargetStates(model, feature_layers, in_bfloat16)
    held_out = states.examples(held_out)
    student = student_of(settings, model, layers, states, examples).to(device)
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    checkpoint = checkpoint_of(settings, layers, feature_layers, examples)
    tokens = sum(len(example.token_ids) for example in examples)
    steps = max(1, int(settings.epochs * tokens / settings.batch_tokens)) if settings.epochs else 0
    step, began = checkpoint.load(student, optimizer) if steps else 0, time.monotonic()
    rng = random.Random(settings.seed + step)
    if steps:
        console.print(f"{len(examples):,} dialogues, {tokens:,} tokens, {steps:,} steps, starting at {step:,}")
        if settings.draft_to_continue is not None:
            console.print(f"before training: {evaluation(student, held_out)}")
    with counting("training", "steps", steps, step) as counter:
        while step < steps:
            for plain_batch in batches(examples, settings.batch_tokens, rng):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, min(200, steps // 10 + 1), settings.peak_rate)
                unrolled = UNROLLED_STEPS if step >= (1 - UNROLLED_SHARE) * steps else 1
                batch = drop_states(states.with_states(plain_batch), rng)
                with torch.autocast(student.head.device.type, torch.bfloat16, in_bfloat16):
                    loss = distillation_loss(student, batch, unrolled)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                step += 1
                counter.advance(f", loss {loss.item():.3f}")
                if step % settings.evaluate_every == 0 or step == steps:
                    seconds = time.monotonic() - began
                    console.print(f"step {step:,}, {seconds:,.0f} s: {evaluation(student, held_out)}")
                    checkpoint.save(student, optimizer, step)
                    save(settings.output / INT8_FILE, student.trained())
                if step == steps:
                    break
    export(settings, target, student, states.examples(examples[:CALIBRATION_DIALOGUES]), held_out)


def export(
    settings: DistillSettings, target: str, student: Student, calibration: list[Example], held_out: list[Example]
) -> None:
    """Save the draft in int8, in 4 bits if they hardly lower its agreement, and as a model with the smaller weights."""
    compact, rounded = settings.output / INT8_FILE, settings.output / ROUNDED_FILE
    save(compact, student.trained())
    console.print("rounding weights to 4 bits")
    save(rounded, {**student.trained(), **round_student(student, calibration)})
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
    console.print(f"specpool up --target {target} --draft {folder}")


def save(file: Path, trained: Mapping[str, Weight]) -> None:
    """Write a draft's weights, atomically."""
    with atomic_write(file) as partial:
        save_compact(partial, trained)


def agreement_of(file: Path, student: Student, held_out: list[Example]) -> float:
    """Agreement of a saved draft with its target. The student takes over its weights."""
    student.learn(load_trained(file))
    return agreement_rate(agreement(student, held_out)[0])


def student_of(
    settings: DistillSettings, model: PreTrainedModel, layers: list[int], states: TargetStates, examples: list[Example]
) -> Student:
    """An untrained student with the target's most frequent tokens in its output head, or the initial student."""
    file = settings.draft_to_continue
    initial = None if file is None else load_trained(file)
    if initial is not None:
        layers, output_ids = list(range(count_layers(initial))), initial["output_ids"].long()
    else:
        output_ids = frequent_tokens(examples, model.config.vocab_size, settings.output_tokens)
    if not states.layers:
        student = Student(model, layers, output_ids)
        if initial is not None:
            student.learn(initial)
        return student
    student = FeatureStudent(model, layers, output_ids, states.layers).to(model.device)
    fitted = states.examples(examples[:FITTED_DIALOGUES])
    if initial is not None:
        student.learn(initial)
    else:
        student.fit_input(model, layers[0], fitted)
    student.set_units(fitted)
    return student


def frequent_tokens(examples: list[Example], vocabulary: int, count: int) -> torch.Tensor:
    """The tokens that the target chooses most often, and those that it nearly chooses."""
    counts = torch.zeros(vocabulary)
    for example in examples:
        counts += torch.bincount(example.top_ids[:, 0], minlength=vocabulary)
        counts += 0.01 * torch.bincount(example.top_ids[:, 1:4].flatten(), minlength=vocabulary)
    return most_frequent(counts, min(count, vocabulary))


def evaluation(student: Student, held_out: list[Example]) -> str:
    """Agreement of the student with its target on held-out dialogues, as text."""
    agreed = agreement(student, held_out, max(REPORTED_K))
    rates = ", ".join(f"{agreement_rate(each):.3f}" for each in agreed)
    lengths = ", ".join(f"{mean_acceptance_length(agreed, k):.2f}" for k in REPORTED_K)
    return f"agreement {rates}, mean acceptance length at k = 1 to 5: {lengths}"


if __name__ == "__main__":
    main()

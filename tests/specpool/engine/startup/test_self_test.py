"""If a protection is disabled, the self-test fails, unless thousands of rows keep their bits."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_random_gguf
from interpreted_kernels import FakeGraphs, StaleGraphs, attend_pages, imitate_graphs, imitate_kernels
from tiny_models import load_engine, random_tokens, round_weights, save_model, small_config
from torch.nn.functional import silu

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import Activations, EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.loading import load_model
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes import fused_layers, modules
from specpool.engine.passes.gpu import attention as gpu_attention
from specpool.engine.passes.gpu import gemm as gpu_gemm
from specpool.engine.passes.gpu import layers
from specpool.engine.passes.gpu.gemm import Gemm, GemmBackend
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.gpu.states import StateMemory
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind
from specpool.engine.passes.native import decoder
from specpool.engine.passes.native.decoder import Linear
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.probes import batch_invariance, kernels
from specpool.engine.probes.kernels import choose_gemms
from specpool.engine.probes.native_gemm import gemms_agree
from specpool.engine.probes.operations import OperationProbe
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine
from specpool.engine.startup import self_test

Undo = Callable[[pytest.MonkeyPatch], None]

# Rows to compare at most, by pass size. The reference is passes of one token.
SIZES = {**dict.fromkeys((2, 3, 5, 7, 12), 120), **dict.fromkeys((97, 130, 271, 389, 500), 500)}


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def slow(values: Iterable[Any]) -> list[Any]:
    """Mark parameters as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def different_rows(engine: Engine, length: int = 500) -> int:
    """Number of rows of logits, out of thousands, whose bits differ from those of passes of one token."""
    tokens = random_tokens(length, seed=3)
    alone = torch.cat([engine.forward([Span(0, at, [token], 1)]) for at, token in enumerate(tokens)])
    different = 0
    for size, max_rows in SIZES.items():
        compared = tokens[: min(max_rows, length)] if size <= length else []
        for at in range(0, len(compared), size):
            piece = compared[at : at + size]
            logits = engine.forward([Span(1, at, piece, len(piece))])
            different += int((logits != alone[at : at + len(piece)]).any(-1).sum())
    return different


# --- Passes of torch operations


def _no_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modules, "in_chunks", lambda function, x: function(x))


def _fused_rotation(patch: pytest.MonkeyPatch) -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    patch.setattr(fused_layers, "rotate", rotate)


def _no_prepacked_gemms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forward, "can_prepack", lambda *_: False)


def _plain_gemms_on_prepacked_tiles(patch: pytest.MonkeyPatch) -> None:
    _no_prepacked_gemms(patch)
    patch.setattr(forward, "choose_tiles", lambda *_: Tiles(kv=64, max_rows=512))


def _no_tiles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forward, "choose_tiles", lambda *_: Tiles())


def _no_attention_tiles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_invariance, "_attention_agrees", lambda *_: True)
    patch.setattr(batch_invariance, "ATTENTION_TILE_SHAPES", ((1, 1), (8, 64)))


def _last_row_tiles_untested(patch: pytest.MonkeyPatch) -> None:
    _no_prepacked_gemms(patch)
    patch.setattr(batch_invariance, "_rows_agree", lambda linear, x, tiles: tiles.row_multiple == 64)


def _one_shape_untested(patch: pytest.MonkeyPatch) -> None:
    _no_prepacked_gemms(patch)
    patch.setattr(batch_invariance, "_rows_agree", lambda *_: False)
    patch.setattr(batch_invariance, "_one_shape_agrees", lambda *_: True)


DISABLED: list[Undo] = [
    _no_chunks,
    _fused_rotation,
    _no_prepacked_gemms,
    _plain_gemms_on_prepacked_tiles,
    _no_tiles,
    _no_attention_tiles,
    _last_row_tiles_untested,
    _one_shape_untested,
]


@pytest.mark.cpus
@pytest.mark.thorough
@pytest.mark.parametrize("undo", [_no_tiles, *slow(undo for undo in DISABLED if undo is not _no_tiles)])
def test_a_disabled_protection_fails_the_self_test_or_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undo: Undo, cpu_threads: int
) -> None:
    undo(monkeypatch)
    folder = save_model(tmp_path, small_config("llama", intermediate_size=160))
    engine = load_engine(folder, threads=cpu_threads, native=False)
    assert not engine.bitwise or different_rows(engine) == 0


@pytest.mark.cpus
@pytest.mark.parametrize("features", [160, *slow([192])])
def test_an_intact_pass_succeeds(tmp_path: Path, features: int, cpu_threads: int) -> None:
    folder = save_model(tmp_path, small_config("llama", intermediate_size=features))
    engine = load_engine(folder, threads=cpu_threads, native=False)
    assert engine.bitwise
    assert different_rows(engine) == 0


def test_one_different_element_in_thousands_is_found() -> None:
    """Some values round differently at one place in one row. Random tokens rarely hit them."""

    def scalar_rest(x: torch.Tensor) -> torch.Tensor:
        whole = silu(x)
        rounded_otherwise = x.frexp().mantissa.abs() > 0.99
        place = torch.zeros(x.shape, dtype=torch.bool)
        place.view(-1)[-161:][:1] = True  # none if there is only one row
        place |= torch.tensor(x.numel() == 1)
        return torch.where(place & rounded_otherwise, whole.nextafter(whole + 1), whole)

    library = torch.library.Library("specpool_test", "DEF")
    library.define("silu(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("silu", scalar_rest, "CPU")
    operation, numbers = torch.ops.specpool_test.silu, torch.ones(24, 160)
    with torch.inference_mode(), OperationProbe([]) as probe:
        operation(numbers[:1])
        assert not probe.unequal
        operation(numbers)
        assert list(probe.unequal) == ["specpool_test::silu"]


# --- The probe of operations


def unequal(operation: Callable[[torch.Tensor], Any], *constants: torch.Tensor, width: int = 96) -> list[str]:
    """Names of batch-dependent operations, in passes of 1, 2, 7, 97 and 271 rows."""
    with torch.inference_mode(), OperationProbe(constants) as probe:
        for rows in (1, 2, 7, 97, 271):
            operation(torch.ones(rows, width))
    return list(probe.unequal)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x * 2 + 1,
        lambda x: x.sum(0),
        lambda x: x.mean(-1),
        lambda x: x.softmax(0),
        lambda x: x.view(-1, 4, 24).sum(1) + x.view(-1, 8, 12).sum(1)[:, :1],
        lambda x: x.gather(-1, x.topk(1).indices),
        lambda x: x.masked_fill(torch.ones(len(x), x.shape[1], dtype=torch.bool), 0.0),
        lambda x: x[None] * torch.arange(len(x))[None, :, None],
        lambda x: (x[:, :0] * 2, x.new_empty(3), torch.empty_like(x), x.bernoulli(), torch.rand_like(x)),
        lambda x: torch.cat([x, x]).split(len(x)),
        lambda x: x.half().float(),
    ],
)
def test_operations_that_mix_rows_or_move_data_are_ignored(operation: Callable[[torch.Tensor], Any]) -> None:
    assert unequal(operation) == []


def matmul_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A GEMM that sums in reverse order for many rows."""
    order = slice(None) if len(x) < 50 else torch.arange(x.shape[1] - 1, -1, -1)
    total = torch.zeros(len(x), weight.shape[1])
    for i in torch.arange(x.shape[1])[order].tolist():
        total += x[:, i : i + 1] * weight[i]
    return total


def softmax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """A softmax that sums in reverse order for many rows."""
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    total = torch.zeros(len(x), 1)
    for i in range(x.shape[1]) if len(x) < 50 else reversed(range(x.shape[1])):
        total += exponentials[:, i : i + 1]
    return exponentials / total


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Change the last bit of many numbers if there are many rows."""
    return x * 1.1 if len(x) < 50 else (x * 1.1).nextafter(torch.tensor(torch.inf))


@pytest.fixture(scope="module")
def operations() -> Iterator[Any]:
    """Custom operations, such as a library of kernels may define."""
    library = torch.library.Library("specpool_uneven", "DEF")
    for schema, function in (
        ("matmul(Tensor x, Tensor weight) -> Tensor", matmul_by_rows),
        ("softmax(Tensor x) -> Tensor", softmax_by_rows),
        ("scale(Tensor x) -> Tensor", uneven),
        ("scale_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.copy_(uneven(x.clone()))),
        ("joined(Tensor[] parts) -> Tensor", lambda parts: uneven(sum(parts[1:], start=parts[0]))),
        ("named(Tensor x, *, Tensor other) -> Tensor", lambda x, other: uneven(x) + other),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    yield torch.ops.specpool_uneven
    library._destroy()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("scale", lambda own, x, weight: own.scale(x)),
        ("scale", lambda own, x, weight: own.scale(x[:, :1])),
        ("scale_", lambda own, x, weight: own.scale_(x.clone())),
        ("joined", lambda own, x, weight: own.joined([x, x])),
        ("named", lambda own, x, weight: own.named(x, other=x)),
        ("softmax", lambda own, x, weight: own.softmax(x)),
        ("matmul", lambda own, x, weight: own.matmul(x, weight)),
        ("matmul", lambda own, x, weight: own.matmul(x, weight.view(32, 96).t())),
        ("matmul", lambda own, x, weight: own.matmul(x, weight[:, ::2])),
    ],
)
def test_batch_dependent_operations_are_detected(operations: Any, name: str, call: Callable[..., Any]) -> None:
    weight = torch.randn(96, 32)
    assert unequal(lambda x: call(operations, x, weight), weight) == [f"specpool_uneven::{name}"]


def test_the_failed_operation_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2 has GEMMs outside linear layers, for which no tiles are searched."""
    engine = load_engine(save_model(tmp_path, small_config("gpt2", n_layer=2, n_head=4)), threads=1)
    assert engine.bitwise or "equal rows do not have equal bits after aten::addmm" in caplog.text
    assert not engine.bitwise or different_rows(engine) == 0


# --- The GPU's kernels


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> KVArena:
    pytest.importorskip("triton")
    for name, smaller in (("SPLIT", 32), ("BLOCK", 16), ("BUSY_PROGRAMS", 2)):  # the interpreter is slow
        monkeypatch.setattr(gpu_attention, name, smaller)
    monkeypatch.setattr(kernels, "POSITIONS", (30,))
    return KVArena(1, 1, 16, 16, torch.float32, torch.device("cpu"), tables=(1, 1), page_size=16)


def test_bits_that_depend_on_pages_are_detected(monkeypatch: pytest.MonkeyPatch, arena: KVArena) -> None:
    for kind in (FULL_ATTENTION, AttentionKind(20, torch.ones(3), 5.0)):
        assert kernels.attention_agrees(arena, 3, 50, kind)

    def attend(query: torch.Tensor, copies: KVArena, *others: Any) -> torch.Tensor:
        in_order = bool((copies.tables[others[4][0]].diff() == 1).all())
        return gpu_attention.attend_pages(query, copies, *others) * (1 + 1e-6 * in_order)

    monkeypatch.setattr(kernels, "attend_pages", attend)
    assert not kernels.attention_agrees(arena, query_groups=3, max_length=50)


def test_batch_dependent_splits_are_detected(monkeypatch: pytest.MonkeyPatch, arena: KVArena) -> None:
    def attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
        monkeypatch.setattr(gpu_attention, "SPLIT", 32 if len(query) == 1 else 16)
        return gpu_attention.attend_pages(query, *others[:-2], 8)

    monkeypatch.setattr(kernels, "attend_pages", attend)
    assert not kernels.attention_agrees(arena, query_groups=3, max_length=50)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Imitate the kernels, and choose GEMMs as on a GPU."""
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "choose_gemms", choose_gemms)
    return monkeypatch


def gemms_of(folder: Path, exact: bool = True, **options: Any) -> list[Gemm]:
    folder = save_model(folder, small_config("llama"))
    model = load_engine(folder, exact, native=False, cuda_graphs=False, **options).forward_pass
    assert isinstance(model, GpuModel)
    return model.gemms()


@pytest.mark.parametrize("differs", [lambda rows: rows == 320, lambda rows: rows == 8, lambda rows: rows > 8])
def test_batch_dependent_gemms_are_not_chosen(
    choosing: pytest.MonkeyPatch, tmp_path: Path, differs: Callable[[int], bool]
) -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
        exact = gpu_gemm.split_k_gemm(x, weight, split_k)
        return (x.flip(-1) @ weight.flip(-1).T)[None] if differs(len(x)) else exact

    choosing.setattr(gpu_gemm, "cublas_gemm", multiply)
    assert {gemm.backends for gemm in gemms_of(tmp_path)} == {"triton"}


def make_cublas_faster(patch: pytest.MonkeyPatch, from_rows: int = 1) -> None:
    def seconds(gemms: object, backend: GemmBackend, rows: int, capture: object) -> float:
        return 2.0 if backend == "cublas" and rows >= from_rows else 3.0 if backend == "triton" else 4.0

    patch.setattr(kernels, "_seconds_of", seconds)


def reversed_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
    return gpu_gemm.split_k_gemm(x.flip(-1), weight.flip(-1), split_k)


@pytest.mark.parametrize(("from_rows", "chosen"), [(41, 64), (320, 320), (321, None)])
def test_cublas_multiplies_as_many_rows_as_make_it_faster(
    choosing: pytest.MonkeyPatch, tmp_path: Path, from_rows: int, chosen: int | None
) -> None:
    choosing.setattr(gpu_gemm, "cublas_gemm", gpu_gemm.split_k_gemm)
    make_cublas_faster(choosing, from_rows)
    assert {gemm.cublas_rows for gemm in gemms_of(tmp_path)} == {chosen}


@pytest.mark.slow
def test_gemms_with_different_bits_are_chosen_consistently(choosing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choosing.setattr(gpu_gemm, "cublas_gemm", reversed_gemm)
    make_cublas_faster(choosing)
    assert {gemm.backends for gemm in gemms_of(tmp_path)} == {"triton"}
    assert {gemm.backends for gemm in gemms_of(tmp_path, gemm="cublas")} == {"cublas"}
    assert {gemm.backends for gemm in gemms_of(tmp_path, exact=False)} == {"triton, cublas from 8 rows"}


def test_failing_gemms_are_not_chosen(choosing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("out of resource")

    exact = gpu_gemm.split_k_gemm
    choosing.setattr(gpu_gemm, "split_k_gemm", refuse)
    choosing.setattr(gpu_gemm, "cublas_gemm", exact)
    assert {gemm.backends for gemm in gemms_of(tmp_path)} == {"cublas"}


def test_without_an_exact_gemm_all_passes_have_one_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "choose_gemms", lambda *_: False)
    engine = load_engine(save_model(tmp_path, small_config("llama")), native=False, cuda_graphs=False)
    assert engine.max_num_batched_tokens == engine.tiles.max_rows == 64
    assert "64 rows at a time" in engine.notes[0]


def test_the_self_test_probes_attention_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    imitate_kernels(monkeypatch)
    folder = save_model(tmp_path, small_config("llama"))
    options = {"native": False, "cuda_graphs": False, "max_sequences": 2, "max_model_len": 32}
    assert load_engine(folder, **options).bitwise
    real = kernels.attend_pages
    monkeypatch.setattr(kernels, "attend_pages", lambda *a: real(*a) * (1 + 1e-6 * (len(a[0]) > 1)))
    assert not load_engine(folder, **options).bitwise


# --- Captured passes, and several splits of attention


class StaleBatches(FakeGraphs):
    """Passes of more than 8 rows compute what they were captured with."""

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        replay, result = super().__call__(run)
        return (lambda: None) if len(result) > 8 else replay, result


@pytest.mark.parametrize(
    ("graphs", "result"),
    [
        (FakeGraphs, nullcontext(True)),
        (StaleBatches, nullcontext(False)),
        (StaleGraphs, pytest.raises(UnsupportedModelError, match="another kind of attention")),
    ],
)
def test_stale_replays_fail_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: type[FakeGraphs], result: Any
) -> None:
    """If all replays are stale, the model is refused."""
    pytest.importorskip("triton")
    imitate_graphs(monkeypatch, graphs=graphs())
    folder = save_model(tmp_path, small_config("llama"))
    with result as bitwise:
        assert load_engine(folder, native=False, max_sequences=4, max_model_len=64).bitwise is bitwise


def test_outdated_layers_fail_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    imitate_graphs(monkeypatch)
    choose = StateMemory.choose
    monkeypatch.setattr(StateMemory, "choose", lambda own, layers: None if own._layers else choose(own, layers))
    folder = save_model(tmp_path, small_config("llama"))
    assert not load_engine(folder, native=False, max_sequences=4, max_model_len=64).bitwise


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 1, 8])
def test_batch_dependent_attention_to_several_splits_fails_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None
) -> None:
    """The probe of attention sees intact kernels. `rows`: passes of more rows round long sequences otherwise."""
    pytest.importorskip("triton")
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(self_test, "LONG_PROMPTS", (gpu_attention.SPLIT + 44,))

    def attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
        attended, positions = attend_pages(query, *others), others[4]
        is_other = rows is not None and int((others[5] >= 0).sum()) > rows
        return torch.where((positions >= gpu_attention.SPLIT)[:, None, None] & is_other, attended * 1.000001, attended)

    monkeypatch.setattr(layers, "attend_pages", attend)
    folder = save_model(tmp_path, small_config("llama"))
    engine = load_engine(folder, native=False, cuda_graphs=False, max_sequences=6, max_model_len=320)
    assert engine.bitwise is (rows is None)


# --- The compiled pass


def change_source(changes: dict[str, str], patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Replace texts in the sources of the compiled pass. Exactly one file has each text."""
    sources = {source.name: source.read_text() for source in decoder.SOURCES}
    for before, after in changes.items():
        (name,) = (name for name, source in sources.items() if before in source)
        sources[name] = sources[name].replace(before, after)
    for name, source in sources.items():
        (folder / name).write_text(source)
    patch.setattr(decoder, "SOURCES", tuple(folder / name for name in sources))


TERM = "sums[r][p] += w * x[r * inputs + k];"


def _backwards(rows: int) -> dict[str, str]:
    """GEMMs of this number of rows sum in reverse order."""
    return {
        "wide w = dense_weight(kind, weight, p);": f"int64_t j = rows == {rows} ? count - 1 - k : k;"
        "wide w = dense_weight(kind, weight + (j - k) * dense_bytes(kind), p);",
        TERM: "sums[r][p] += w * x[r * inputs + j];",
    }


NATIVE_MUTANTS = {
    **{f"{rows} rows backwards": (_backwards(rows), False) for rows in (1, 2, 3)},
    "threads beyond the first scale otherwise": (
        {TERM: "sums[r][p] += w * (x[r * inputs + k] * (thread_number ? 1.0000001f : 1.0f));"},
        None,
    ),
    **{
        f"{rows} rows unfused": (
            {
                TERM: f"{{ wide product = w * x[r * inputs + k]; if (rows == {rows}) "
                '__asm__("" : "+m"(product)); sums[r][p] += product; }'
            },
            None,
        )
        for rows in (1, 2)
    },
    "shorter blocks for many rows": (
        {"(inputs + BLOCK - 1) / BLOCK": "(inputs + BLOCK - 1) / (rows > 4 ? 32 : BLOCK)"},
        True,
    ),
}


@pytest.mark.cpus
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["1 rows backwards", *slow([*NATIVE_MUTANTS][1:])])
def test_a_mutated_compiled_pass_fails_the_self_test_or_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cpu_threads: int
) -> None:
    changes, harmless = NATIVE_MUTANTS[name]
    change_source(changes, monkeypatch, tmp_path)
    folder = save_model(tmp_path / "model", small_config("llama"))
    if name == "2 rows backwards":
        round_weights(folder)  # stored in bfloat16
    mutant = load_engine(folder, threads=cpu_threads)
    assert isinstance(mutant.forward_pass, NativeModel)
    assert not mutant.bitwise or different_rows(mutant) == 0
    assert harmless in (None, mutant.bitwise)


WIDENING_MUTANTS = {
    "codes have another middle": ("Q4_0", {"kind == Q4_0 ? 8": "kind == Q4_0 ? 9"}),
    "scales lose digits": ("Q8_0", {"= of_float16(own, p);": "= of_float16(own, p) * 1.000001f;"}),
    "scales are those of offsets": (
        "Q4_K",
        {"of_float16(shared, p) * numbers(byte_of(own, p, 0) >> 24 & 255)":
         "of_float16(shared, p) * numbers(byte_of(own, p, 1) >> 24 & 255)"},
    ),
    "weights of few rows lose digits": (
        "Q4_0",
        {"wide w = weight_of(kind, codes[a], &scales[a], p, group, i);":
         "wide w = weight_of(kind, codes[a], &scales[a], p, group, i); if (rows == 1) w += 1e-6f; "},
    ),
    "weights in the cache lose digits": (
        "Q4_0",
        {"put(wide_weights + i * PANEL, p, w);": "put(wide_weights + i * PANEL, p, w + 1e-6f);"},
    ),
}  # fmt: skip


def model_with_panels(folder: Path, kind: str, activations: Activations = "float32") -> NativeModel:
    """The compiled pass of a model with weights of one kind."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}
    folder.mkdir()
    model = str(save_random_gguf(folder, lambda name: kind, **sizes))
    options = EngineOptions(model=model, device="cpu", activations=activations)
    forward_pass = forward.build_forward_pass(load_model(options), options)
    assert isinstance(forward_pass, NativeModel)
    assert forward_pass.kinds.keys() == {kind}
    return forward_pass


@pytest.mark.cpus
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["codes have another middle", *slow([*WIDENING_MUTANTS][1:])])
def test_wrong_dequantization_fails_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, changes = WIDENING_MUTANTS[name]
    change_source(changes, monkeypatch, tmp_path)
    assert not gemms_agree(model_with_panels(tmp_path / "model", kind))


@pytest.mark.cpus
@pytest.mark.parametrize("kind", ["Q4_K", *slow(["Q4_0", "Q6_K"])])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_correct_gemms_pass_the_self_test(tmp_path: Path, kind: str, activations: Activations) -> None:
    assert gemms_agree(model_with_panels(tmp_path / "model", kind, activations))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_wrong_int8_gemms_fail_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """An error of a tenth of the weights exceeds the rounding error of 8 bits."""
    model = model_with_panels(tmp_path / "model", "Q4_1", "int8")
    gemm = model._gemm

    def wrong(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        return gemm(linear, rows) + share * gemm(linear, rows.abs())

    monkeypatch.setattr(model, "_gemm", wrong)
    assert gemms_agree(model) == (share == 0)

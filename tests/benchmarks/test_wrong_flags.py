"""Wrong flags and missing programs: every benchmark ends with one line that names the flag, before any work."""

import sys
from collections.abc import Callable
from importlib import import_module

import pytest

FILE = __file__
WRONG = {
    "adaptation": [("--num-prompts=63", "--num-prompts"), ("--epochs=0", "--epochs"), (f"--output={FILE}", "--output"),
                   ("--num-prompts=640", "--num-prompts: 720 prompts with --held-out, but there are 640")],
    "cost.__main__": [("--of=nothing", "invalid choice: 'nothing'"), *(
        (f"--of={part} {flag}", refusal)
        for part in ("coordinator",)
        for flag, refusal in (
            ("--sequences=0", "argument --sequences: '0' is not an integer from 1 to 256"),
            ("--tokens=0", "argument --tokens: '0' is not an integer from 1 to 4000"),
            ("--k=-1", "argument --k: '-1' is not an integer from 0 to 16"),
            ("--repeats=0", "argument --repeats: '0' is not an integer from 1 to 1000"),
        )
    ), *((f"--of=round {flag}", "--prompts: ") for flag in ("--prompts=/nowhere", f"--prompts={FILE}"))],
    "emulated_worker": [("", "the following arguments are required: worker, --port, --pass-ms"), *(
        (f"draft --port=1 --pass-ms 1 1 {flag}", f"argument {flag.split('=')[0].split()[0]}: ")
        for flag in ("--port=a", "--port=-1", "--port=65536", "--pass-ms 1", "--pass-ms a 1", "--pass-ms 1 nan",
                     "--pass-ms 0 0", "--acceptance=nan", "--acceptance=a", "--second-guess=2")
    )],
    "engine": [("--dtype=int8", "--dtype"), ("--shape=huge", "--shape"),
               ("--shape=qwen3-0.6b --device=foo", "--device: device foo cannot be used: ")],
    "equality": [("--reference=gpu", "--reference"), ("--activations=int4", "--activations")],
    "hybrid": [("--layers=3", "--layers"), ("--shape=qwen3-8b", "--shape"), (f"--output={FILE}", "--output")],
    "llamacpp": [
        (flag, flag.split("=")[0])
        for flag in ("--concurrency=0", "--concurrency=1,257", "--concurrency=", "--tokens=0", "--repeats=0",
                     "--gguf=/nowhere", "--prompts=/nowhere", f"--prompts={FILE}", "--prompts=/dev/null")
    ],
    "lookup": [("", "the following arguments are required: --prompts"), *(
        (f"--prompts=/dev/null {flag}", f"argument {flag.split('=')[0]}: ")
        for flag in ("--k=0", "--row-costs=2", "--row-costs=a", "--tokens=0", "--tickets=0", f"--output={FILE}")
    ), ("--prompts=/nowhere", "--prompts: "), (f"--prompts={FILE}", "--prompts: ")],
    "monitoring": [("--seconds=5", "--seconds"), (f"--output={FILE}", "--output")],
    "openai": [("--http=127.0.0.1:1", "--coordinator and --http must be given together"), *(
        (flag, flag.split("=")[0]) for flag in ("--streams=0", "--tokens=0", "--prompts=/nowhere", f"--output={FILE}")
    )],
    "pair": [
        (f"--output={FILE}", "--output"), ("--output=/tmp --acceptance=1.1", "--acceptance: 1.1 is not from 0 to 1"),
        ("--output=/tmp --device=foo", "--device"), ("--output=/tmp --seed=" + "9" * 30, "--seed"),
    ],
    "quality": [
        (flag, f"{flag.split('=')[0]}: ")
        for flag in ("--tokens=0", "--num-prompts=0", "--prompts=/nowhere", f"--prompts={FILE}", "--prompts=/dev/null",
                     "--model=/nowhere", f"--output={FILE}")
    ],
    "realign": [(flag, "--prompts: ") for flag in ("--prompts=/nowhere", f"--prompts={FILE}", "--prompts=/dev/null")],
    "split_devices": [
        (flag, f"argument {flag.split('=')[0].split()[0]}: ")
        for flag in ("--sequences=0", "--tokens=0", "--repeats=0", "--verify-ms nan 0", "--verify-ms 0 1",
                     "--draft-ms 1 -1", "--acceptance=nan", f"--output={FILE}")
    ],
    "sustained": [
        (flag, flag.split("=")[0])
        for flag in ("--clients=0", "--clients=1,257", "--seconds=5", "--repeats=0", "--prompts=/nowhere",
                     f"--output={FILE}")
    ],
    "throughput": [("--kinds=plain,best_of_all", "unknown: best_of_all"), ("--arrangements=both", "unknown: both"), *(
        (flag, flag.split("=")[0])
        for flag in ("--concurrencies=a", "--concurrencies=4,0", "--max-tokens=0", "--repeats=0", "--num-prompts=-1",
                     "--category-concurrency=-1", "--prompts=/nope", f"--prompts={FILE}", f"--output={FILE}")
    )],
    "vllm": [
        (flag, f"error: argument {flag.split('=')[0]}: ")
        for flag in ("--concurrency=0", "--concurrency=1,257", "--tokens=1", "--repeats=0")
    ] + [("--prompts=/nowhere", "--prompts: ")],
}  # fmt: skip
"""Flags of each benchmark, and a part of the refusal."""

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a benchmark that must fail. Return the last line that it prints or exits with."""

    def run(module: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [module, *flags])
        with pytest.raises(SystemExit) as ended:
            import_module(f"benchmarks.{module}").main()
        if isinstance(ended.value.code, str):
            assert "\n" not in ended.value.code
            return ended.value.code
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("module", "flags", "expected"), [(module, *case) for module, cases in WRONG.items() for case in cases]
)
def test_wrong_flags_are_named(module: str, flags: str, expected: str, refusal: Refusal) -> None:
    assert expected in refusal(module, *flags.split())


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("", " must name a Python that has xllamacpp"),
        ("/nowhere/python", ": /nowhere/python: No such file"),
        (sys.executable, f": {sys.executable} has no xllamacpp"),
    ],
)
def test_missing_llamacpp_is_named(python: str, reason: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_LLAMACPP_PYTHON", python)
    said = refusal("llamacpp")
    assert said.startswith(f"llamacpp: SPECPOOL_LLAMACPP_PYTHON{reason}")
    assert said.endswith("python3 -m venv DIR && DIR/bin/pip install xllamacpp")


def test_missing_vllm_is_named(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_PYTHON", "/nowhere/python")
    assert "/nowhere/python: no Python with vLLM" in refusal("vllm")

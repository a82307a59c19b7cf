"""`specpool` without the extra `cli`, its summaries, and Ctrl-C."""

import os
import subprocess
import sys
from importlib.metadata import version
from itertools import chain

import pytest

from specpool import __main__ as entry
from specpool.cli.main import COMMANDS, MODULES
from specpool.cli.usage import SUMMARIES, usage
from specpool.distill.settings import DistillSettings
from specpool.environment import extras


def test_summaries_are_those_of_the_commands() -> None:
    assert SUMMARIES.keys() == COMMANDS.keys() | MODULES.keys()
    for name, (settings, _) in COMMANDS.items():
        assert SUMMARIES[name] == (settings.__doc__ or "").splitlines()[0]
    assert SUMMARIES["distill"] == DistillSettings.__doc__


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the modules of all extras."""
    for module in chain.from_iterable(extras.MODULES.values()):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("base_install")
@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        ([], 0, usage(), ""),
        (["--help"], 0, usage(), ""),
        (["--version"], 0, f"specpool {version('specpool')}", ""),
        (["distil"], 2, "", "specpool: unknown command distil (did you mean distill?); see specpool --help"),
    ],
)
def test_a_base_install_answers_without_extras(
    arguments: list[str], status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        entry.main(arguments)
    assert end.value.code == status
    assert capsys.readouterr() == (out and out + "\n", err and err + "\n")


@pytest.mark.parametrize("hidden", [["pydantic"], []])
def test_output_without_a_reader_ends_quietly(hidden: list[str]) -> None:
    """As in `specpool --help | head -3`, with and without extras."""
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from specpool.__main__ import main; main()"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.usefixtures("base_install")
def test_commands_name_the_missing_extra() -> None:
    with pytest.raises(SystemExit, match=r"^specpool distill: needs torch, .*\[worker\]"):
        entry.main(["distill", "--help"])


@pytest.mark.parametrize("module", ["specpool.cli.usage", "specpool.distill.settings"])
def test_modules_read_before_torch_do_not_import_it(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""The figures of the README and the docs are those of benchmarks/results."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.figures.__main__ import main
from benchmarks.figures.blocks import BLOCKS
from benchmarks.figures.pages import BLOCK, COMMANDS, FOLDER, ROOT, pages
from benchmarks.figures.pictures import SOURCES


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the README and the docs."""
    for page in (*pages(ROOT), *(ROOT / picture for picture in SOURCES)):
        target = tmp_path / page.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(page, target)
    return tmp_path


def faults_of(root: Path) -> list[str]:
    """Return the lines of a failed check, without the hint at the end."""
    with pytest.raises(SystemExit) as failure:
        main(["--check"], root)
    *faults, hint = str(failure.value).splitlines()
    assert "python -m benchmarks.figures" in hint
    return faults


def test_pages_show_the_results() -> None:
    main(["--check"])
    shown = {match[2] for page in pages(ROOT) for match in BLOCK.finditer(page.read_text())}
    assert shown == BLOCKS.keys()
    for page in pages(ROOT):
        assert not re.search(r"^<!-- figures: \w+ -->.", page.read_text(), re.MULTILINE)  # Markdown would not render it


def test_every_result_says_how_it_was_measured() -> None:
    files = list(FOLDER.glob("*.json"))
    assert {path.stem for path in files} >= COMMANDS.keys()
    for path in files:
        run = json.loads(path.read_text())["run"]
        assert run.keys() >= {"command", "date", "machine", "versions"}, path
        assert run["command"] == COMMANDS.get(path.stem, run["command"])


def test_check_names_file_line_and_figure_and_a_new_run_repairs_them(copy: Path) -> None:
    readme = copy / "README.md"
    text = readme.read_text()
    readme.write_text(re.sub(r"\d+ of 32 \|", "31 of 32 |", text))
    line = next(i for i, line in enumerate(text.splitlines(), 1) if "of 32 |" in line)
    (fault,) = faults_of(copy)
    assert fault.startswith(f"README.md:{line}: summary: ")
    assert "31 of 32" in fault
    assert "32 of 32" in fault.partition("the results say")[2]
    main([], copy)
    assert readme.read_text() == text
    main(["--check"], copy)


@pytest.mark.parametrize("figure", ["271.2 tokens/s", "1.02x", "1.3 ms"])
def test_check_finds_figures_outside_blocks(copy: Path, figure: str) -> None:
    guide = copy / "docs/guide.md"
    text = guide.read_text()
    guide.write_text(f"{text}It reaches {figure}.\n")
    assert faults_of(copy) == [f"docs/guide.md:{text.count(chr(10)) + 1}: a figure outside a block: {figure}"]
    allowed = (
        f"`{figure}`\n\n```text\n{figure}\n```\n\n<!-- estimates -->\n{figure}\n<!-- /estimates -->\n\n    {figure}\n"
    )
    guide.write_text(text + allowed)
    main(["--check"], copy)


def test_check_finds_unknown_blocks(copy: Path) -> None:
    guide = copy / "docs/guide.md"
    guide.write_text(guide.read_text() + "<!-- figures: wrong --><!-- /figures -->\n")
    assert faults_of(copy) == ["docs/guide.md: no such block or result: 'wrong'"]


@pytest.mark.parametrize("name", ["demo", "monitoring"])
def test_check_finds_pictures_of_an_older_result_and_a_new_run_redraws_them(
    copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "results"))
    monkeypatch.setattr("benchmarks.figures.pages.FOLDER", folder)
    result = json.loads((folder / f"{name}.json").read_text())
    result["run"]["date"] = "2099-01-01"
    (folder / f"{name}.json").write_text(json.dumps(result))
    pictures = [picture for picture, source in SOURCES.items() if source == name]
    faults = [fault for fault in faults_of(copy) if "differs from" in fault]
    assert faults == [f"{picture}: differs from benchmarks/results/{name}.json" for picture in pictures]
    main([], copy)
    main(["--check"], copy)


def test_results_of_two_machines_are_not_mixed(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "results"))
    monkeypatch.setattr("benchmarks.figures.pages.FOLDER", folder)
    changed = json.loads((folder / "equality.json").read_text())
    changed["run"]["machine"] = "an abacus"
    (folder / "equality.json").write_text(json.dumps(changed))
    faults = faults_of(copy)
    assert faults
    assert all("different machines" in fault and "an abacus" in fault for fault in faults)


def test_measuring_saves_the_last_line_and_keeps_the_result_of_a_failure(
    copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "results"))
    monkeypatch.setattr("benchmarks.figures.pages.FOLDER", folder)
    earlier = (folder / "equality.json").read_text()
    measured_on = json.loads(earlier)["run"]["machine"]
    monkeypatch.setattr("benchmarks.report.machine", lambda: measured_on)
    change = 'import json; d = json.load(open("benchmarks/results/demo.json")); print(); d["prompts"] = 3; '
    change += "print(json.dumps(d))"
    monkeypatch.setitem(COMMANDS, "demo", f"python -c '{change}'")
    monkeypatch.setitem(COMMANDS, "equality", "python -c 'raise SystemExit(3)'")
    with pytest.raises(SystemExit, match="equality"):
        main(["--measure", "demo", "equality"], copy)
    demo = json.loads((folder / "demo.json").read_text())
    assert demo["prompts"] == 3
    assert demo["run"]["command"] == COMMANDS["demo"]
    assert (folder / "equality.json").read_text() == earlier
    assert "| 3 chats" in (copy / "README.md").read_text()
    assert "exit status 3" in capfd.readouterr().err

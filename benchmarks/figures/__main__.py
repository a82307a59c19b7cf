"""Show the results of the benchmarks on the README and the docs.

    python -m benchmarks.figures                        fill every block of figures, and draw the pictures
    python -m benchmarks.figures --check                exit with status 1 if a page or picture differs from the results
    python -m benchmarks.figures --measure [NAME ...]   first measure again: all current results, or those named

A block of figures stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. `benchmarks/figures/blocks.py` has
its text, `benchmarks/figures/pages.py` the command behind each file of `benchmarks/results`. Estimates stand between
`<!-- estimates -->` and `<!-- /estimates -->`. Apart from the records (docs/benchmarks.md, docs/decisions.md and
docs/kernels.md), pages show speeds, ratios and milliseconds in such blocks only. llama.cpp is measured with the
environment of `benchmarks.llamacpp`.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures.blocks import BLOCKS
from benchmarks.figures.pages import (
    COMMANDS,
    RECORDS,
    ROOT,
    Results,
    differences,
    filled,
    load,
    measure,
    pages,
    stray_figures,
)
from benchmarks.figures.pictures import SOURCES, draw, outdated
from benchmarks.report import console, parser_of


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Parse the command line; measure, fill or check. `root`: folder with the README and the docs."""
    parser = parser_of(__doc__, prog="python -m benchmarks.figures")
    parser.add_argument("--check", action="store_true", help="only compare the pages with the results")
    parser.add_argument(
        "--measure", nargs="*", choices=COMMANDS, metavar="NAME", help=f"some of: {', '.join(COMMANDS)}"
    )
    options = parser.parse_args(arguments)
    chosen = [] if options.measure is None else options.measure or COMMANDS
    failed = [name for name in chosen if not _measured(name)]
    results = load()
    if options.check:
        if faults := list(check(root, results)):
            sys.exit("\n".join([*faults, "python -m benchmarks.figures fills all blocks"]))
    else:
        for page in pages(root):
            page.write_text(filled(page.read_text(), BLOCKS, results))
        draw(root, results)
    if failed:
        sys.exit(f"failed, so the earlier results stay: {', '.join(failed)}")


def _measured(name: str) -> bool:
    console.print(f"[bold]{name}[/bold]: {COMMANDS[name]}", highlight=False)
    try:
        measure(name)
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
        console.print(f"{name}: {error}", markup=False)
        return False
    return True


def check(root: Path, results: Results) -> Iterator[str]:
    """A message, with file and line, for each figure that differs from the results or has no block."""
    for page in pages(root):
        name, text = page.relative_to(root).as_posix(), page.read_text()
        try:
            yield from (f"{name}:{fault}" for fault in differences(text, filled(text, BLOCKS, results)))
        except KeyError as error:
            yield f"{name}: no such block or result: {error}"
        except ValueError as error:
            yield f"{name}: {error}"
        if name not in RECORDS:
            yield from (f"{name}:{fault}" for fault in stray_figures(text))
    for name in outdated(root, results):
        yield f"{name}: differs from benchmarks/results/{SOURCES[name]}.json"


if __name__ == "__main__":
    main()

"""Compiled code lies in private folders, where nobody else can change it before it is loaded."""

import ctypes
import functools
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpool.engine.passes.native import compiler, folders
from specpool.engine.passes.native.library_cache import NotPrivateError, check_file, private_folder

SIZES = (16, 1, ("FLOAT32",))


@pytest.fixture
def two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The only places for private folders; nothing is compiled yet."""
    found = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(compiler, "places", lambda: found)
    monkeypatch.setattr(compiler, "_compile", functools.cache(compiler._compile.__wrapped__))
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is compiled and what is loaded, in order, with every library and folder seen to be private."""
    events: list[tuple[str, Path]] = []
    run, load = subprocess.run, ctypes.CDLL

    def compile_(command: list[str], **options: Any) -> Any:
        if "-###" in command:  # only asks what would be run
            return run(command, **options)
        output = Path(command[command.index("-o") + 1])
        assert stat.S_IMODE(output.parent.stat().st_mode) == 0o700
        assert output.suffix != ".so", "a library must be whole once it has its name"
        events.append(("compile", output))
        return run(command, **options)

    def load_(name: str) -> ctypes.CDLL:
        events.append(("load", Path(name)))
        return load(name)

    monkeypatch.setattr(compiler.subprocess, "run", compile_)
    monkeypatch.setattr(compiler.ctypes, "CDLL", load_)
    return events


def refuse_to_load(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a place as if its file system were mounted noexec."""
    load = compiler.ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if Path(name).is_relative_to(place):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(compiler.ctypes, "CDLL", refuse)


def compile_as_a_new_process() -> ctypes.CDLL | None:
    compiler._compile.cache_clear()
    return compiler.compile_decoder(*SIZES)


def compiler_that_says(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Makes $CC a compiler that gives this answer when it is asked what it would run."""
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-###*) echo "{text}" >&2; exit {status};; esac\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


def test_a_library_is_compiled_in_a_private_folder_and_kept_for_the_next_process(
    two_places: list[Path], watched: list[tuple[str, Path]]
) -> None:
    umask = os.umask(0)  # by which all new files are open to everybody
    try:
        two_places[0].mkdir(mode=0o700)
        assert compiler.compile_decoder(*SIZES) is not None
    finally:
        os.umask(umask)
    assert [what for what, _ in watched] == ["compile", "load"]
    assert all(path.is_relative_to(two_places[0]) for _, path in watched)
    (kept,) = two_places[0].iterdir()
    assert (kept.name, stat.S_IMODE(kept.stat().st_mode)) == (compiler.KEPT, 0o700)
    assert not two_places[1].exists()
    assert compile_as_a_new_process() is not None
    assert [what for what, _ in watched] == ["compile", "load", "load"]
    assert watched[2][1].parent.parent == two_places[0] != watched[2][1].parent != kept
    assert not watched[2][1].exists()


def test_a_library_for_another_processor_or_from_another_compiler_is_not_loaded(
    two_places: list[Path], watched: list[tuple[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("cc1 -mavx", "cc1 -mavx512f", "cc1 2 -mavx", "cc1 -mavx"):
        compiler_that_says(tmp_path, text, monkeypatch)
        assert compile_as_a_new_process() is not None
    assert [what for what, _ in watched] == ["compile", "load"] * 3 + ["load"]


@pytest.mark.parametrize(("text", "status"), [("cc1", 1), ("", 0), ("a licence", 0)])
def test_nothing_is_kept_if_the_compiler_does_not_say_what_it_would_run(
    text: str,
    status: int,
    two_places: list[Path],
    watched: list[tuple[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler_that_says(tmp_path, text, monkeypatch, status)
    for _ in range(2):
        assert compile_as_a_new_process() is not None
    assert [what for what, _ in watched] == ["compile", "load"] * 2
    assert not [*two_places[0].iterdir()]


def _cut_short(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:8192])


def _flip_a_bit(kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    content[-1000] ^= 1
    kept.write_bytes(content)


def _empty(kept: Path) -> None:
    kept.write_bytes(b"")


def _open_to_all(kept: Path) -> None:
    kept.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("change", "mended"), [(_cut_short, True), (_flip_a_bit, True), (_empty, True), (_open_to_all, False)]
)
def test_a_kept_library_that_cannot_be_trusted_is_compiled_anew(
    change: Callable[[Path], None], mended: bool, two_places: list[Path], watched: list[tuple[str, Path]]
) -> None:
    assert compiler.compile_decoder(*SIZES) is not None
    (kept,) = (two_places[0] / compiler.KEPT).iterdir()
    change(kept)
    watched.clear()
    for _ in range(2):
        assert compile_as_a_new_process() is not None
    compiled = ["compile" for what, _ in watched if what == "compile"]
    assert len(compiled) == (1 if mended else 2)


def test_a_kept_library_is_loaded_in_the_next_place_where_the_first_does_not_allow_it(
    two_places: list[Path], watched: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(two_places[0], monkeypatch)
    for _ in range(2):
        assert compile_as_a_new_process() is not None
    assert [what for what, _ in watched].count("compile") == 2  # once in each place
    assert watched[-1][1].is_relative_to(two_places[1])


def _a_loop_of_links(place: Path, _: pytest.MonkeyPatch) -> None:
    place.symlink_to(place)


def _not_text(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = place.with_name("cc")
    script.write_text('#!/bin/sh\ncase "$*" in *-###*) printf \'cc1 \\377\' >&2;; esac\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


@pytest.mark.parametrize("change", [_a_loop_of_links, _not_text])
def test_what_is_strange_about_a_machine_does_not_keep_code_from_being_compiled(
    change: Callable[[Path, pytest.MonkeyPatch], None], two_places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(two_places[0], monkeypatch)
    assert compiler.compile_decoder(*SIZES) is not None


def test_a_place_that_is_made_is_closed_to_others_whatever_the_umask(
    two_places: list[Path], watched: list[tuple[str, Path]]
) -> None:
    umask = os.umask(0o002)
    try:
        assert compiler.compile_decoder(*SIZES) is not None
    finally:
        os.umask(umask)
    assert (two_places[0] / compiler.KEPT).exists()


def test_only_the_newest_libraries_are_kept(
    two_places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MOST_KEPT", 2)
    kept = two_places[0] / compiler.KEPT
    seen: list[Path] = []
    for version in range(3):
        compiler_that_says(tmp_path, f"cc1 {version}", monkeypatch)
        assert compile_as_a_new_process() is not None
        (new,) = set(kept.iterdir()) - set(seen)
        os.utime(new, (version, version))
        seen.append(new)
    assert set(kept.iterdir()) == set(seen[1:])


def test_where_code_cannot_be_loaded_the_next_place_is_tried(
    two_places: list[Path],
    watched: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_to_load(two_places[0], monkeypatch)
    assert compiler.compile_decoder(*SIZES) is not None
    assert watched[-1][1].is_relative_to(two_places[1])
    assert caplog.text == ""


def test_where_no_place_lets_code_be_loaded_one_warning_says_so(
    two_places: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for place in two_places:
        refuse_to_load(place, monkeypatch)
    for _ in range(2):
        assert compiler.compile_decoder(*SIZES) is None
    (record,) = caplog.records
    assert record.getMessage().count("failed to map segment") == 2


def test_a_place_that_cannot_be_made_is_passed_over(two_places: list[Path], watched: list[tuple[str, Path]]) -> None:
    two_places[0].write_text("a file")
    assert compiler.compile_decoder(*SIZES) is not None
    assert watched[-1][1].is_relative_to(two_places[1])


def test_code_that_does_not_compile_is_not_tried_elsewhere(
    two_places: list[Path], watched: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "FLAGS", ("--no-such-flag",))
    assert compiler.compile_decoder(*SIZES) is None
    assert len(watched) == 1


def test_a_place_that_others_may_write_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    private, open_to_others = (0o700, 0o755, 0o1777, 0o3777), (0o775, 0o777, 0o2777)  # a pod's volumes: 3777, 2777
    for mode in (*private, *open_to_others):
        place.chmod(mode)
        if mode in private:
            with private_folder(place) as folder:
                assert stat.S_IMODE(folder.stat().st_mode) & 0o777 == 0o700
        else:
            with pytest.raises(NotPrivateError, match=str(place)), private_folder(place):
                raise AssertionError("it was made")
        assert not [*place.iterdir()]


@pytest.mark.parametrize("depth", [0, 1], ids=["place", "its parent"])
def test_a_place_of_another_user_is_refused(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "parent" / "place"
    place.mkdir(parents=True)
    theirs = [place, place.parent][depth]
    give_away(theirs, monkeypatch)
    with pytest.raises(NotPrivateError, match=f"{theirs} belongs to user 12345"), private_folder(place):
        raise AssertionError("it was made")


def test_a_link_is_followed_to_the_place_that_is_checked(tmp_path: Path) -> None:
    open_place, link = tmp_path / "open", tmp_path / "link"
    open_place.mkdir()
    open_place.chmod(0o777)
    link.symlink_to(open_place)
    with pytest.raises(NotPrivateError, match=str(open_place)), private_folder(link):
        raise AssertionError("it was made")


def _writable(file: Path, _: pytest.MonkeyPatch) -> None:
    file.chmod(0o664)


def _another_users(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(file, monkeypatch)


def _a_link(file: Path, _: pytest.MonkeyPatch) -> None:
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


@pytest.mark.parametrize("change", [_writable, _another_users, _a_link])
def test_a_library_that_is_not_ours_alone_is_not_loaded(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "decoder.so"
    library.write_bytes(b"")
    library.chmod(0o755)
    check_file(library)
    change(library, monkeypatch)
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda _: pytest.fail("it was loaded"))
    with pytest.raises(NotPrivateError, match=str(library)):
        compiler._load(library)


def test_places_are_the_users_own_before_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path / "tmp"))
    assert folders.places() == [tmp_path / "cache" / "specpool", tmp_path / "run", tmp_path / "tmp"]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a path look as if another user owned it."""
    for name in ("stat", "lstat"):
        look = getattr(Path, name)

        def changed(self: Path, look: Any = look, **options: Any) -> os.stat_result:
            found: os.stat_result = look(self, **options)
            return os.stat_result((*found[:4], 12345, *found[5:])) if self == path else found

        monkeypatch.setattr(Path, name, changed)

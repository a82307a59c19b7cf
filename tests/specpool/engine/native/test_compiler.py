"""Compiled code is cached and loaded from private folders, where no other user can replace it."""

import ctypes
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpool.engine.native import compiler, library_cache
from specpool.engine.native.library_cache import (
    NotPrivateError,
    check_file,
    private_folder,
    remove_stale_folders,
    write_cached,
)

Events = list[tuple[str, Path]]


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny library, to save the compile time of the real one."""
    folder = tmp_path_factory.mktemp("prebuilt")
    (folder / "tiny.c").write_text("int answer(void) { return 42; }\n")
    command = ["cc", "-shared", "-fPIC", "tiny.c", "-o", "tiny.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "tiny.so"


class FakeCompiler:
    """Sets $CC to a script that answers `-###`, and otherwise copies a prebuilt library."""

    def __init__(self, script: Path, prebuilt: Path) -> None:
        self._script, self._prebuilt = script, prebuilt

    def identify_as(self, text: str, status: int = 0) -> None:
        self._script.write_text(
            f"#!/bin/sh\ncase \"$*\" in *-###*) printf '{text}' >&2; exit {status};; esac\n"
            f'while [ "$1" != -o ]; do shift; done\ncp {self._prebuilt} "$2"\n'
        )
        self._script.chmod(0o755)


@pytest.fixture(autouse=True)
def fake_cc(prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler(tmp_path / "cc", prebuilt)
    fake.identify_as("cc1")
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    return fake


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The only two candidate folders. Nothing is compiled yet."""
    return [tmp_path / "first", tmp_path / "second"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Compilations and loads, in order. Compilations must write to private folders."""
    log: Events = []
    run, load = subprocess.run, ctypes.CDLL

    def compile_(command: list[str], **options: Any) -> Any:
        if "-###" not in command:
            output = Path(command[command.index("-o") + 1])
            assert stat.S_IMODE(output.parent.stat().st_mode) == 0o700
            assert output.suffix != ".so", "an incomplete library must not have its final name"
            log.append(("compile", output))
        return run(command, **options)

    def load_(name: str) -> ctypes.CDLL:
        log.append(("load", Path(name)))
        return load(name)

    monkeypatch.setattr(compiler.subprocess, "run", compile_)
    monkeypatch.setattr(compiler.ctypes, "CDLL", load_)
    return log


def refuse_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder behave as if mounted noexec."""
    load = compiler.ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if Path(name).is_relative_to(folder):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(compiler.ctypes, "CDLL", refuse)


def compile_in_new_process(folders: list[Path]) -> ctypes.CDLL | None:
    compiler._compile.cache_clear()
    return compiler.compile_library("the forward pass", [compiler.POOL], folders=folders)


@pytest.mark.parametrize("umask", [0, 0o002])
def test_a_library_is_compiled_privately_and_cached(folders: list[Path], events: Events, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert compile_in_new_process(folders) is not None
    finally:
        os.umask(before)
    assert [what for what, _ in events] == ["compile", "load"]
    assert all(path.is_relative_to(folders[0]) for _, path in events)
    (cache,) = folders[0].iterdir()
    assert (cache.name, stat.S_IMODE(cache.stat().st_mode)) == (compiler.CACHE_FOLDER, 0o700)
    assert not folders[1].exists()
    assert compile_in_new_process(folders) is not None
    assert [what for what, _ in events] == ["compile", "load", "load"]
    loaded = events[2][1]
    assert loaded.parent.parent == folders[0]
    assert loaded.parent != cache, "cache entries must not be loaded directly"
    assert not loaded.exists()


def test_a_cached_library_is_used_for_the_same_compiler_and_processor_only(
    folders: list[Path], events: Events, fake_cc: FakeCompiler
) -> None:
    for text in ("cc1 -mavx", "cc1 -mavx512f", "cc1 2 -mavx", "cc1 -mavx"):
        fake_cc.identify_as(text)
        assert compile_in_new_process(folders) is not None
    assert [what for what, _ in events] == ["compile", "load"] * 3 + ["load"]


@pytest.mark.parametrize(("text", "status"), [("cc1", 1), ("", 0), ("a licence", 0)])
def test_nothing_is_cached_if_the_compiler_does_not_identify_itself(
    text: str, status: int, folders: list[Path], events: Events, fake_cc: FakeCompiler
) -> None:
    fake_cc.identify_as(text, status)
    for _ in range(2):
        assert compile_in_new_process(folders) is not None
    assert [what for what, _ in events] == ["compile", "load"] * 2
    assert not [*folders[0].iterdir()]


def _flip_a_bit(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-1000] ^= 1
    entry.write_bytes(content)


UNTRUSTED: dict[str, tuple[Callable[[Path], object], bool]] = {
    "truncated": (lambda entry: entry.write_bytes(entry.read_bytes()[:8192]), True),
    "changed": (_flip_a_bit, True),
    "empty": (lambda entry: entry.write_bytes(b""), True),
    "open to others": (lambda entry: entry.parent.chmod(0o777), False),
}


@pytest.mark.parametrize(("change", "is_replaced"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_an_untrusted_cache_entry_is_compiled_again(
    change: Callable[[Path], object], is_replaced: bool, folders: list[Path], events: Events
) -> None:
    assert compile_in_new_process(folders) is not None
    (entry,) = (folders[0] / compiler.CACHE_FOLDER).iterdir()
    change(entry)
    events.clear()
    for _ in range(2):
        assert compile_in_new_process(folders) is not None
    assert [what for what, _ in events].count("compile") == (1 if is_replaced else 2)


def test_only_the_most_recently_used_libraries_stay_cached(tmp_path: Path) -> None:
    entries = [tmp_path / "cache" / name for name in "cab"]
    for age, entry in enumerate(entries):
        write_cached(b"code", entry, max_entries=2)
        os.utime(entry, (age, age))
    assert {*(tmp_path / "cache").iterdir()} == {*entries[1:]}


# --- Unusual machines


def test_the_next_folder_is_used_if_the_first_does_not_allow_loading(
    folders: list[Path], events: Events, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_load(folders[0], monkeypatch)
    for _ in range(2):
        assert compile_in_new_process(folders) is not None
    assert [what for what, _ in events].count("compile") == 2  # once in each folder
    assert events[-1][1].is_relative_to(folders[1])
    assert caplog.text == ""


def test_one_warning_is_logged_if_no_folder_allows_loading(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in folders:
        refuse_to_load(folder, monkeypatch)
    for _ in range(2):
        assert compiler.compile_library("the forward pass", [compiler.POOL], folders=folders) is None
    (record,) = caplog.records
    assert record.getMessage().count("failed to map segment") == 2


@pytest.mark.parametrize(
    "create", [lambda folder: folder.write_text("a file"), lambda folder: folder.symlink_to(folder)]
)
def test_a_folder_that_cannot_be_created_is_skipped(
    create: Callable[[Path], object], folders: list[Path], events: Events
) -> None:
    create(folders[0])
    assert compile_in_new_process(folders) is not None
    assert events[-1][1].is_relative_to(folders[1])


def test_a_compiler_may_identify_itself_in_any_encoding(folders: list[Path], fake_cc: FakeCompiler) -> None:
    fake_cc.identify_as("cc1 \\377")
    assert compile_in_new_process(folders) is not None


def test_code_that_does_not_compile_is_tried_once(
    folders: list[Path], events: Events, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv("DECODER_CFLAGS", "--no-such-flag")
    assert compile_in_new_process(folders) is None
    assert len(events) == 1
    assert "compiling the forward pass failed" in caplog.text
    assert "no-such-flag" in caplog.text


@pytest.mark.parametrize("name", ["CC", "DECODER_CFLAGS"])
def test_an_open_quote_is_logged(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(name, "cc '")
    with caplog.at_level("INFO"):
        assert compiler.compile_library("the forward pass", [compiler.POOL]) is None
    expected = f"the forward pass needs a C compiler, and ${name} cannot be parsed (no closing quotation)"
    assert expected in caplog.text


def test_code_is_compiled_only_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.platform, "system", lambda: "Darwin")
    assert compiler.compiler_problem() == ("is compiled only on Linux", "")


# --- Killed processes

KILLED = """
import os, sys
from pathlib import Path
from specpool.engine.native.library_cache import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    (folder / "library.part").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    (tmp_path / "parent").mkdir()
    return tmp_path / "parent"


def test_folders_of_killed_processes_are_removed_and_those_in_use_stay(parent: Path) -> None:
    command, pipe = [sys.executable, "-c", KILLED, str(parent)], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        killed, running = (Path(process.stdout.readline().strip()) for process in processes if process.stdout)
        processes[0].kill()
        processes[0].wait()
        assert killed.is_dir()
        others = [parent / "specpool-compiled-file", parent / "specpool-compiled-open", parent / "compiled-mine"]
        others[0].touch()
        for other in others[1:]:
            other.mkdir()
            other.chmod(0o755)  # another user's, or another program's
        with private_folder(parent) as folder:
            assert {*parent.iterdir()} == {folder, running, *others}
        processes[1].communicate("")
        assert {*parent.iterdir()} == {*others}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_limited_number_of_stale_folders_is_removed_at_a_time(parent: Path) -> None:
    for number in range(3):
        (parent / f"specpool-compiled-{number}").mkdir(mode=0o700)
    for rest in (1, 0):
        remove_stale_folders(parent, maximum=2)
        assert len([*parent.iterdir()]) == rest


@pytest.mark.parametrize("error", [FileNotFoundError, BlockingIOError])
def test_a_folder_that_another_process_removes_before_it_is_locked_is_replaced(
    error: type[OSError], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = library_cache._lock, []

    def take_first(folder: Path) -> int:
        if not taken:
            taken.append(folder)
            folder.rmdir()
            raise error
        return lock(folder)

    monkeypatch.setattr(library_cache, "_lock", take_first)
    with private_folder(parent) as folder:
        assert folder.is_dir()
        assert [folder] != taken


def test_a_file_system_without_locks_is_usable(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(library_cache.fcntl, "flock", refuse)
    with private_folder(parent) as first, private_folder(parent) as second:
        assert {*parent.iterdir()} == {first, second}
    assert not [*parent.iterdir()]


# --- Privacy


def test_a_parent_that_others_can_write_is_rejected_unless_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    private, open_to_others = (0o700, 0o755, 0o1777, 0o3777), (0o775, 0o777, 0o2777)  # a pod's volumes: 3777, 2777
    for mode in (*private, *open_to_others):
        parent.chmod(mode)
        if mode in private:
            with private_folder(parent) as folder:
                assert stat.S_IMODE(folder.stat().st_mode) & 0o777 == 0o700
        else:
            with pytest.raises(NotPrivateError, match=str(parent)), private_folder(parent):
                pytest.fail("the folder was created")
        assert not [*parent.iterdir()]


@pytest.mark.parametrize("depth", [0, 1], ids=["parent", "grandparent"])
def test_a_folder_of_another_user_is_rejected(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "grandparent" / "parent"
    parent.mkdir(parents=True)
    foreign = [parent, parent.parent][depth]
    give_away(foreign, monkeypatch)
    with pytest.raises(NotPrivateError, match=f"{foreign} belongs to user 12345"), private_folder(parent):
        pytest.fail("the folder was created")


def test_a_link_is_followed_before_the_check(tmp_path: Path) -> None:
    open_folder, link = tmp_path / "open", tmp_path / "link"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    link.symlink_to(open_folder)
    with pytest.raises(NotPrivateError, match=str(open_folder)), private_folder(link):
        pytest.fail("the folder was created")


def _replace_by_link(file: Path, _: pytest.MonkeyPatch) -> None:
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path look as if another user owned it."""
    for name in ("stat", "lstat"):
        real = getattr(Path, name)

        def fake(self: Path, real: Any = real, **options: Any) -> os.stat_result:
            status: os.stat_result = real(self, **options)
            return os.stat_result((*status[:4], 12345, *status[5:])) if self == path else status

        monkeypatch.setattr(Path, name, fake)


@pytest.mark.parametrize("change", [lambda file, _: file.chmod(0o664), give_away, _replace_by_link])
def test_a_library_that_others_could_write_is_not_loaded(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "decoder.so"
    library.write_bytes(b"")
    library.chmod(0o755)
    check_file(library)
    change(library, monkeypatch)
    with pytest.raises(NotPrivateError, match=str(library)):
        compiler._load(library)


def test_folders_of_the_user_come_before_shared_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    assert library_cache.candidate_folders() == [tmp_path / "cache" / "specpool", tmp_path / "run", tmp_path / "tmp"]

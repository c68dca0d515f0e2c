"""Paths that commands write to: checked before the work, and written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.outputs import check_output_file, check_output_folder, write_output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, an empty folder, and a link to nowhere."""
    (tmp_path / "file.json").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere" / "x.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "--x must name a file, got ''"),
        (".", "--x must name a file, got '.'"),
        ("/", "--x must name a file, got '/'"),
        ("folder", "--x folder: is a folder, not a file"),
        ("file.json/a.json", "--x file.json/a.json: file.json is a file, not a folder"),
        ("file.json/a/b/c.json", "file.json is a file, not a folder"),
        ("n" * 300, "cannot be written (File name too long)"),
        ("new/" + "n" * 300 + "/a.json", "cannot be written (File name too long)"),
        ("a\udcff.json", "is not valid UTF-8"),
        ("a\0.json", "has a NUL character"),
    ],
    ids=lambda value: "",
)
def test_a_file_that_cannot_be_written_is_one_line(here: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_output_file("--x", path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "--x must name a folder, got ''"),
        ("file.json", "--x file.json: file.json is a file, not a folder"),
        ("file.json/new", "file.json is a file, not a folder"),
        ("n" * 300, "cannot be written (File name too long)"),
        ("a\udcff", "is not valid UTF-8"),
    ],
    ids=lambda value: "",
)
def test_a_folder_that_cannot_be_written_is_one_line(here: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_output_folder("--x", path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_ending_of_a_file_is_checked(here: Path) -> None:
    check_output_file("--x", "a.PNG", (".png", ".svg"))
    with pytest.raises(ConfigError, match=r"--x must end with \.png, \.svg, got a\.gif"):
        check_output_file("--x", "a.gif", (".png", ".svg"))


def test_no_permission_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As os.access says it: root may write everywhere, and the tests may run as root."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for check, path in (
        (check_output_file, "file.json"),
        (check_output_file, "new.json"),
        (check_output_folder, "folder"),
        (check_output_folder, "new/folder"),
    ):
        with pytest.raises(ConfigError, match="cannot be written .no permission"):
            check("--x", path)


def test_checks_leave_no_trace_and_allow_what_can_be_made(here: Path) -> None:
    before = sorted(here.rglob("*"))
    for path in ("file.json", "new.json", "new/deep/a.json", "link.json", "/dev/stdout"):
        check_output_file("--x", path)
    for path in (".", "folder", "new/deep", here / "folder" / "x"):
        check_output_folder("--x", path)
    assert sorted(here.rglob("*")) == before
    assert (here / "file.json").read_text() == "old"


def test_a_write_makes_the_folder_and_replaces_the_file(here: Path) -> None:
    for path in ("file.json", "new/deep/a.json", "link.json"):
        write_output("--x", here / path, lambda partial: partial.write_text("new"))
        assert (here / path).read_text() == "new"
    assert (here / "link.json").is_symlink()
    assert not list(here.rglob(".partial*"))


def test_a_full_disk_keeps_the_old_file_and_is_one_line(here: Path) -> None:
    def fill(partial: Path) -> None:
        partial.write_text("half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match=r"--x .*file.json: cannot be written \(No space left"):
        write_output("--x", here / "file.json", fill)
    assert (here / "file.json").read_text() == "old"
    assert not list(here.rglob(".partial*"))

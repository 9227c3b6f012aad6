"""Files are written whole or not at all."""

import contextlib
import errno
import json
import os
import resource
import stat

import pytest

from fusedcomm import files, trace


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """A file that grows larger cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_trace(path, numel):
    trace.write(path, {"traceEvents": ["x" * numel]})


def test_on_a_full_disk_the_old_file_stays_and_no_other(tmp_path):
    write_trace(tmp_path / "file.json", 10)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with files_of_at_most(len(before) + 512), pytest.raises(OSError) as error:
        write_trace(tmp_path / "file.json", 1_000_000)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(path) and str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
    write_trace(tmp_path / "file.json", 11)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_a_matter_of_writing_is_raised_as_it_is(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "file") as file:
        file.write(b"new")
        1 / 0  # noqa: B018
    with pytest.raises(IsADirectoryError) as error:
        files.write_text(folder, "text")
    assert error.value.filename == str(folder)
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "none" / "file", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_link_is_replaced_and_no_unfinished_file_is_foreseen(tmp_path, monkeypatch):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("theirs")
    link.symlink_to(target)
    files.write_text(link, "ours")
    assert target.read_text() == "theirs" and link.read_text() == "ours" and not link.is_symlink()
    # Somebody foresees the name, and has put a link there.
    monkeypatch.setattr(files.secrets, "token_hex", lambda nbytes: "foreseen")
    (tmp_path / ".link.foreseen").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write_text(link, "more")
    assert target.read_text() == "theirs" and link.read_text() == "ours"


def test_its_mode_is_that_of_the_old_file_or_of_a_new_one(tmp_path):
    old, new, plain = tmp_path / "old", tmp_path / "new", tmp_path / "plain"
    old.touch()
    old.chmod(0o640)
    plain.touch()
    for path in (old, new):
        files.write_text(path, "é")
        assert path.read_bytes() == "é".encode()
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert new.stat().st_mode == plain.stat().st_mode


def test_a_pipe_and_an_open_file_are_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(tmp_path / "file", "w+") as file:
        for path in (pipe, f"/dev/fd/{file.fileno()}"):
            files.write_text(path, json.dumps({"a": 1}))
        assert os.read(reader, 100) == file.read().encode() == b'{"a": 1}'
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    files.write_text(os.devnull, "nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)

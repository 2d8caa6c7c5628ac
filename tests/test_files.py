"""Files are written whole or not at all, and only where a regular file was or nothing."""

import os
import pathlib

import pytest

from nnx_inspector.files import replace_file, write_all


def test_a_file_is_replaced_whole_and_goes_on_at_its_end(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "run"
    for parts in ([b"old, and longer"], [b"n", b"", b"ew"]):
        file, size = replace_file(target, iter(parts))
        assert target.read_bytes() == b"".join(parts)
        assert size == target.stat().st_size
        assert write_all(file, b"er") == 2
        os.close(file)
    assert target.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["run"]


def test_a_failure_leaves_the_old_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run"
    target.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def broken():
        yield b"half"
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        replace_file(target, broken())
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(target, [b"new"])
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    assert target.read_bytes() == b"old"


def test_what_is_no_file_stays_and_is_told(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=f"This is a device or a pipe.*'{tmp_path}/pipe'"):
            replace_file(tmp_path / name, [b"x"])
    with pytest.raises(IsADirectoryError, match=r"This is a folder\. Pass the path of a file"):
        replace_file(tmp_path, [b"x"])
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "run", [b"x"])
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_keeps_its_mode(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "private"
    path.write_bytes(b"old")
    path.chmod(0o600)
    file, _ = replace_file(path, [b"new"])
    os.close(file)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_folder_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder; make it first: .*'.*/missing'"):
        replace_file(tmp_path / "missing" / "run.nni", [b""])


@pytest.mark.parametrize(
    "name", ["n" * 253, "n" * 255, "\u20ac" * 85, "\U0001f600" * 63, "run.nni"]
)
def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: pathlib.Path, name: str) -> None:
    for content in (b"old", b"new"):
        file, _ = replace_file(tmp_path / name, [content])
        os.close(file)
    assert (tmp_path / name).read_bytes() == b"new"
    assert os.listdir(tmp_path) == [name]


def test_a_path_of_bytes_is_a_path(tmp_path: pathlib.Path) -> None:
    file, _ = replace_file(os.fsencode(tmp_path / "run"), [b"whole"])
    os.close(file)
    assert (tmp_path / "run").read_bytes() == b"whole"

"""Writes a file in one piece or not at all, and shows that the process that writes it lives.

Invariant: what is not a regular file (a device, a pipe, a folder) is left as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Final

HEARTBEAT_SECONDS: Final = 2.0


def real_path(path: str | bytes | os.PathLike[str]) -> str:
    """The path without symbolic links."""
    return os.path.realpath(os.fsdecode(path))


def short_name(path: str) -> str:
    """A path's last two parts, or "notebook cell" for the generated name of a cell."""
    parts = path.split(os.sep)
    if parts[-1].startswith(("<", "ipykernel_")) or (len(parts) > 1 and "ipykernel_" in parts[-2]):
        return "notebook cell"
    return "/".join(parts[-2:])


def replace_file(path: str | bytes | os.PathLike[str], parts: Iterable[bytes]) -> tuple[int, int]:
    """Write a file in place of the one at `path`, or of the one that a link there points to.

    Returns:
        The file, open for writing at its end, and its size in bytes.

    Raises:
        OSError: it cannot be written, or `path` is no regular file; the old one is left as it was.
    """
    path = real_path(path)
    if os.path.exists(path) and not os.path.isfile(path):
        kind = errno.EISDIR if os.path.isdir(path) else errno.EINVAL
        what = "a folder" if kind == errno.EISDIR else "a device or a pipe"
        raise OSError(kind, f"This is {what}. Pass the path of a file", path)
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):  # else the error would name our temporary file
        raise FileNotFoundError(errno.ENOENT, "There is no such folder; make it first", folder)
    # a name may have 255 bytes, on some file systems fewer, and each letter may take four
    new = os.path.join(folder, f".{name[:30]}.{secrets.token_hex(4)}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if os.path.exists(path):
            with contextlib.suppress(PermissionError):  # of a file system without modes
                shutil.copymode(path, new)  # a file that others may not read stays so
        size = sum(write_all(file, part) for part in parts)
        os.fsync(file)  # after a power failure the name must not refer to an unwritten file
        os.replace(new, path)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return file, size


def write_all(file: int, data: bytes) -> int:
    """Write all of the data to an open file; returns its size in bytes."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    return len(data)


def is_gone(file: int) -> bool:
    """Whether an open file was deleted, or replaced by another; NFS says so by an error."""
    try:
        return os.fstat(file).st_nlink == 0
    except OSError as error:
        return error.errno == errno.ESTALE


class Heartbeat:
    """Sets a file's time every few seconds, so that whoever follows it sees the process live.

    It writes no data, so it works on a full disk too. Its thread never keeps a process up, takes no
    lock, and ends with `stop` or when the owner of `beat` is gone.

    Args:
        beat: a bound method, called in the thread. It may raise OSError, which is dropped: a beat
            that is missing says enough.
    """

    def __init__(self, beat: Callable[[], None]):
        self._beat = weakref.WeakMethod(beat)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="nnx_inspector heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS) and (beat := self._beat()) is not None:
            with contextlib.suppress(OSError):
                beat()
            del beat

    def stop(self) -> None:
        self._stopped.set()


def touch(path: str, identity: tuple[int, int]) -> None:
    """Set the time of the file at `path` to now, if it is still this device and inode."""
    found = os.stat(path)
    if (found.st_dev, found.st_ino) == identity:
        os.utime(path)

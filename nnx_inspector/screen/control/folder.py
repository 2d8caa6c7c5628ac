"""The folder of a run's requests, `run.nni.control` beside `run.nni`: writing and reading them.

A request is a JSON file: the id of the run and a message of the protocol, which is checked field by
field. Values that were asked for come back as a file too (`values.py`). Invariant: a folder or file
that another user may write, or a link, is refused; a request to another run is never carried out,
and what is no request is deleted. Imports no jax.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.files import real_path, write_all
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.values import MOST_BYTES, SiteValues, unpack_values

Path = str | bytes | os.PathLike[str]
LARGEST_REQUEST: Final = 65_536
"""The largest file that is read as a request, in bytes."""
REQUESTS: Final = (
    protocol.Perturb, protocol.Adjust, protocol.Remove, protocol.SwitchAll, protocol.SetEvery,
    protocol.MeasureNext, protocol.ReadSite,
)  # fmt: skip
"""What can be asked of a run."""
VALUES: Final = ".values"
MOST_VALUES: Final = 4
"""How many files of values wait to be read."""
_NO_LINK_NO_WAIT: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_WRITE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def folder_of(recording: Path) -> str:
    """The folder of the requests to the run that writes this recording."""
    return real_path(recording) + ".control"


def why_refused(folder: str) -> str:
    """Why a folder cannot hold requests: somebody else could write into it. "" if it can."""
    status = os.lstat(folder)
    above = os.stat(os.path.dirname(folder))
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder!r} is not a folder"
    if not _is_mine(status):
        return f"{folder!r} belongs to another user, or others may write into it"
    shared = above.st_mode & _WRITE_BY_OTHERS and not above.st_mode & stat.S_ISVTX
    if shared and not _is_mine(above):
        return f"others may write into {os.path.dirname(folder)!r}"
    return ""


def _is_mine(status: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):  # Windows: who may write is not in the mode
        return True
    return status.st_uid == os.getuid() and not status.st_mode & _WRITE_BY_OTHERS


def create_folder(recording: Path) -> str:
    """Make the folder for a run, or empty the one that is there.

    Raises:
        InspectorError: the folder is another user's, or others may write into it.
        OSError: it cannot be made.
    """
    folder = folder_of(recording)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if why := why_refused(folder):
        raise InspectorError(
            f"The run takes no requests, because {why}. Write the recording into a folder of your "
            f"own, or leave out control=."
        )
    for name in os.listdir(folder):
        if not name.startswith(".nfs"):  # deleted already, and still open somewhere
            with contextlib.suppress(IsADirectoryError, PermissionError):  # a folder is no request
                os.unlink(os.path.join(folder, name))
    return folder


def send_request(recording: Path, run: str, message: protocol.Request) -> None:
    """Ask a run for something; `message` is one of REQUESTS.

    Raises:
        InspectorError: the run takes no requests, or would not read this one, or others may write
            into the folder.
        OSError: the request cannot be written.
    """
    text = _text(message, run)
    folder = folder_of(recording)
    if not os.path.lexists(folder):
        raise InspectorError(
            "this run takes no requests, or it is over. Start it with "
            "nni.watch(model, save=path, control=True)."
        )
    if why := why_refused(folder):
        raise InspectorError(f"the request was not sent, because {why}.")
    _write_whole(folder, f"{time.time_ns():020d}-{secrets.token_hex(4)}.json", text)


def _text(message: protocol.Request, run: str) -> bytes:
    """What `_message` reads as this message: what a run cannot read it never answers."""
    try:
        if not isinstance(message, REQUESTS):
            raise TypeError(f"a run takes no {type(message).__name__}")
        text = json.dumps({"run": run, "message": protocol.to_header(message)}, default=_plain)
        if len(text) > LARGEST_REQUEST:
            raise ValueError(f"it has {len(text)} bytes, of which a run reads {LARGEST_REQUEST}")
        read = protocol.from_header(json.loads(text)["message"])
        if lost := [name for name, one in vars(message).items() if vars(read)[name] != one]:
            raise ValueError(f"its {lost[0]} cannot be {vars(message)[lost[0]]!r}")
    except (TypeError, ValueError) as error:
        raise InspectorError(f"the request was not sent: {str(error).rstrip('.')}.") from error
    return text.encode()


def _plain(value: object) -> object:
    """A number of NumPy as Python's, which JSON can hold."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number")


def _write_whole(folder: str, name: str, data: bytes) -> None:
    """Put a file into a folder: whole, or not at all."""
    new = os.path.join(folder, f".{secrets.token_hex(8)}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(file, data)
    finally:
        os.close(file)
    os.rename(new, os.path.join(folder, name))


def write_values(folder: str, number: int, data: bytes) -> None:
    """Put the values there that a request has asked for. Those of earlier ones go, except the last
    few: perhaps nobody is left to read them.
    """
    before = [name for name in os.listdir(folder) if name.endswith(VALUES)]
    paths = sorted((os.path.join(folder, name) for name in before), key=os.path.getmtime)
    for path in paths[: 1 - MOST_VALUES]:
        os.unlink(path)
    _write_whole(folder, f"{number}{VALUES}", data)


def read_values(recording: Path, run: str, number: int) -> SiteValues:
    """The values that a request has asked for; their file is deleted.

    Raises:
        InspectorError: they are not there, or in a file of another form.
    """
    path = os.path.join(folder_of(recording), f"{number}{VALUES}")
    data = _read_own_file(path, MOST_BYTES + LARGEST_REQUEST)
    if data is None:
        raise InspectorError("the values that the run has sent are not there, or cannot be read.")
    with contextlib.suppress(OSError):
        os.unlink(path)
    try:
        return unpack_values(data, run)
    except ValueError as error:
        raise InspectorError(f"the values that the run has sent cannot be read: {error}.") from None


def take_requests(folder: str, run: str) -> Iterator[protocol.Request]:
    """The requests to a run, oldest first. Each is deleted, and so is what is no request; one to
    another run is left to it: two runs may write the same file, of which the later one stays.
    """
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".json")):
        path = os.path.join(folder, name)
        text = _read_own_file(path)
        if text is not None and _is_for_another_run(text, run):
            continue
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(path)
        if text is not None and (message := _message(text, run)) is not None:
            yield message


def remove_folder(folder: str) -> None:
    """Remove a folder and the requests in it, as far as that is possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _read_own_file(path: str, most: int = LARGEST_REQUEST) -> bytes | None:
    """What a file holds; None if it is a link, large, or not this user's."""
    try:
        file = os.open(path, os.O_RDONLY | _NO_LINK_NO_WAIT)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not (stat.S_ISREG(status.st_mode) and _is_mine(status) and status.st_size <= most):
            return None
        with open(file, "rb", closefd=False) as opened:
            return opened.read(most)
    finally:
        os.close(file)


def _is_for_another_run(text: bytes, run: str) -> bool:
    try:
        to = json.loads(text)["run"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return False
    return isinstance(to, str) and to != run


def _message(text: bytes, run: str) -> protocol.Request | None:
    try:
        request = json.loads(text)
        if not isinstance(request, dict) or request.get("run") != run:
            return None
        message = protocol.from_header(request.get("message"))
    except (ValueError, RecursionError):  # of any form: a ProtocolError is a ValueError
        return None
    return message if isinstance(message, REQUESTS) else None

"""A file of sections: columns of numbers, each section checked and chained to those before it.

A section is a header with a checksum of its own and a body in the safetensors format. The file
grows by whole sections. Invariant: a section is read exactly as it was written, and in its place;
a short last section is a torn write, which is distinguished from damage. Does not know what the
columns mean, and imports no jax. It also says what a file of another kind is. The format is in
notebooks/recording-format.md.
"""

from __future__ import annotations

import codecs
import os
import stat
import struct
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from nnx_inspector.errors import InspectorError

MAGIC: Final = b"nnx_inspector recording 1\n"
HEADER: Final = struct.Struct("<4sIQI")
"""Kind, flags, bytes of the body, CRC-32 of the body."""
CHECK: Final = struct.Struct("<I")
"""CRC-32 of the header, seeded with the check of the section before."""
FIRST_CHECK: Final = zlib.crc32(MAGIC)
OPTIONAL: Final = 1
"""The flag of a section that a reader may skip if it does not know the kind."""
MOST_JSON: Final = 4096
"""The largest JSON header of a body, in bytes."""

BEGINNING: Final = 512
"""How many bytes of a file say what it is."""
WAY_OUT: Final = (
    "nni.load reads the file that insp.save(path), recording.save(path) or "
    "nni.watch(model, save=path) wrote."
)

_CHUNK: Final = 2**20
_TYPES: Final = ("uint8", "uint32", "int64", "float32", "float64")

_BEGINNINGS: Final = (
    (b"PK\x03\x04", "it is a zip archive (an .npz, .keras or PyTorch file is one, too)"),
    (b"\x1f\x8b", "it is compressed by gzip; unpack it first, if a recording is inside"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd; unpack it first, if a recording is inside"),
    (b"\x93NUMPY", "it is a NumPy array (.npy)"),
    (b"\x89HDF", "it is an HDF5 file"),
    (b"\x80", "it looks like a pickle or a msgpack file"),
)

Columns = Mapping[str, npt.NDArray[Any]]


class DamagedError(ValueError):
    """A section is damaged, or was never a section."""


class Section(NamedTuple):
    """One section of a file.

    Attributes:
        kind: four bytes.
        at: the offset of its header, in bytes.
        columns: its arrays, by name.
    """

    kind: bytes
    at: int
    columns: dict[str, np.ndarray]


class Writer:
    """Makes the sections of one file, in order.

    Attributes:
        check: the check of the last section made.
    """

    def __init__(self) -> None:
        self.check = FIRST_CHECK

    def section(self, kind: bytes, columns: Columns, *, optional: bool = False) -> bytes:
        """The bytes of the next section; a reader that does not know an `optional` kind skips it.

        Its columns are contiguous arrays of uint8, uint32, int64, float32 or float64.
        """
        body = safetensors.numpy.save(dict(columns))
        head = HEADER.pack(kind, OPTIONAL * optional, len(body), zlib.crc32(body))
        self.check = zlib.crc32(head, self.check)
        return head + CHECK.pack(self.check) + body


class Reader:
    """The sections of an open file, one after the other.

    Attributes:
        size: the size of the file in bytes when it was opened, or when reading went on.
        at: the end of the last whole section that was read.
        torn: the bytes of a last section that was not written to its end.
    """

    def __init__(self, file: BinaryIO):
        self.at, self._check = 0, FIRST_CHECK
        self.go_on(file)

    def go_on(self, file: BinaryIO) -> None:
        """Read on behind the last whole section, in the same file opened anew."""
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.torn = 0
        file.seek(self.at)

    def sections(self, known: Container[bytes]) -> Iterator[Section]:
        """The sections of known kinds, from the first that was not read to the last whole one.

        Raises:
            DamagedError: this is not such a file, or a checksum is wrong.
        """
        if not self.at:
            if self._file.read(len(MAGIC)) != MAGIC:
                raise DamagedError("its first bytes are not those of a recording")
            self.at = len(MAGIC)
        while (rest := self.size - self.at) > 0:
            at, around = self.at, HEADER.size + CHECK.size
            head = self._file.read(around)
            if len(head) < around:
                self.torn = rest
                return
            check = zlib.crc32(head[: HEADER.size], self._check)
            if head[HEADER.size :] != CHECK.pack(check):
                raise DamagedError(f"the section at byte {at} has a header with a wrong checksum")
            kind, flags, length, body_check = HEADER.unpack_from(head)
            if length > rest - around:
                self.torn = rest
                return
            where, section = f"the section {kind!r} at byte {at}", None
            if kind in known:
                body = self._file.read(length)
                if zlib.crc32(body) != body_check:
                    raise DamagedError(f"{where} has a wrong checksum")
                try:
                    section = Section(kind, at, columns_of(body))
                except ValueError as error:
                    raise DamagedError(f"{where}: {error}") from error
                del body
            elif not flags & OPTIONAL:
                raise DamagedError(
                    f"{where} is of a kind that only a newer nnx_inspector can read, such as the "
                    "one that wrote it"
                )
            elif self._skipped(length) != body_check:
                raise DamagedError(f"{where} has a wrong checksum")
            self.at, self._check = at + around + length, check
            if section is not None:
                yield section

    def _skipped(self, length: int) -> int:
        check = 0
        while length > 0 and (part := self._file.read(min(length, _CHUNK))):
            check, length = zlib.crc32(part, check), length - len(part)
        return check


def columns_of(body: bytes) -> dict[str, np.ndarray]:
    """The arrays of a section's body.

    Raises:
        ValueError: it is not a safetensors blob, or has a dtype that sections do not have.
    """
    if len(body) < 8 or int.from_bytes(body[:8], "little") > MOST_JSON:
        raise ValueError(f"its JSON header is missing or longer than {MOST_JSON} bytes")
    try:
        columns = safetensors.numpy.load(body)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a safetensors blob of NumPy dtypes ({error})") from error
    for name, column in columns.items():
        if column.dtype.name not in _TYPES:
            raise ValueError(f"column {name!r} has dtype {column.dtype}, not one of {_TYPES}")
    return columns


def column(
    columns: Mapping[str, object],
    name: str,
    dtype: npt.DTypeLike,
    shape: tuple[int | None, ...] = (None,),
) -> np.ndarray:
    """One column, checked for dtype and shape; None in the shape stands for any length.

    Raises:
        ValueError: the column is missing, or has another dtype or shape.
    """
    found = columns.get(name)
    if not isinstance(found, np.ndarray):
        raise ValueError(f"column {name!r} is missing")
    alike = len(found.shape) == len(shape) and all(
        m is None or n == m for n, m in zip(found.shape, shape, strict=True)
    )
    if found.dtype != np.dtype(dtype) or not alike:
        wanted = f"{np.dtype(dtype)}[{', '.join('n' if m is None else str(m) for m in shape)}]"
        raise ValueError(f"column {name!r} is {found.dtype}{list(found.shape)}, not {wanted}")
    return found


def text_columns(
    name: str, texts: Iterable[str], *, ends: str = "", dtype: npt.DTypeLike = np.int64
) -> dict[str, np.ndarray]:
    """Texts as a column of UTF-8 bytes, and another of where each ends.

    A str may hold half a surrogate pair: not valid UTF-8, but this way it is read back.
    """
    pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    sizes = [len(piece) for piece in pieces]
    return {name: data, ends or f"{name}_ends": np.cumsum(sizes, dtype=dtype)}


def texts_in(
    columns: Mapping[str, object], name: str, ends: str = "", dtype: npt.DTypeLike = np.int64
) -> Iterator[str]:
    """The texts of `text_columns`, one by one.

    Raises:
        ValueError: the columns do not fit each other, or are not UTF-8.
    """
    data, start = column(columns, name, np.uint8).data, 0
    for end in ends_in(columns, ends or f"{name}_ends", dtype, len(data)).tolist():
        yield bytes(data[start:end]).decode("utf-8", "surrogatepass")
        start = end


def ends_in(
    columns: Mapping[str, object], name: str, dtype: npt.DTypeLike, size: int
) -> npt.NDArray[np.int64]:
    """The end of each of the pieces that together fill `size` bytes.

    Raises:
        ValueError: they do not.
    """
    ends = column(columns, name, dtype).astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any() or (int(ends[-1]) if len(ends) else 0) != size:
        raise ValueError(f"column {name!r} does not divide the {size} bytes that it belongs to")
    return ends


def open_recording(path: str | bytes | os.PathLike[str]) -> BinaryIO:
    """Open a file that begins as a recording does, at its first byte.

    Raises:
        InspectorError: it is not a recording; the message says what it looks like.
        OSError: the file cannot be opened.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise _FolderError(f"{os.fspath(path)!r} is a folder{_IN_A_FOLDER} {WAY_OUT}")
    if not stat.S_ISREG(mode):
        raise InspectorError(f"{os.fspath(path)!r} is not a regular file. {WAY_OUT}")
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    head = file.read(BEGINNING)
    if not head.startswith(MAGIC):
        file.close()
        raise InspectorError(f"{os.fspath(path)!r} {describe_other_file(head)}")
    return file


def describe_other_file(head: bytes) -> str:
    """What a file that does not begin like a recording is instead, and what to do."""
    text = head.lstrip().lower()
    line = MAGIC.rpartition(b" ")[0]
    if not head:
        what = "it is empty: nothing was written to it, or it was cut off"
    elif MAGIC.startswith(head):
        what = "it was cut off before the first pass"
    elif head.startswith(MAGIC[:-1] + b"\r"):
        return (
            "is a recording whose line ends were changed, which damages it: it was copied as text. "
            "Copy it again as a binary file; in git, mark *.nni as binary."
        )
    elif head.startswith(line):
        version = head.partition(b"\n")[0].rpartition(b" ")[2].decode("ascii", "replace")
        return (
            f"is a recording in version {version} of the format, which only a newer nnx_inspector "
            f"can read. Upgrade: pip install --upgrade nnx_inspector."
        )
    elif known := [what for beginning, what in _BEGINNINGS if head.startswith(beginning)]:
        what = known[0]
    elif head[8:9] == b"{" and head[4:8] == bytes(4):
        what = "it is a safetensors file, perhaps the arrays of a checkpoint"
    elif text.startswith((b"<!doctype html", b"<html")):
        what = "it is a web page; if insp.to_html wrote it, open it in a browser"
    elif text.startswith(b"{"):
        what = "it is JSON; if it is a notebook, open it in Jupyter"
    elif _is_text(head):
        what = "it is a text file"
    else:
        what = "it begins with unknown bytes"
    return f"is not a recording: {what}. {WAY_OUT}"


def _is_text(head: bytes) -> bool:
    try:
        decoded = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end within a letter
    except UnicodeDecodeError:
        return False
    return "\0" not in decoded


_IN_A_FOLDER: Final = (
    ", not a recording: a recording is one file. If it holds a checkpoint, restore it with the "
    "library that saved it and inspect the model: nni.Inspector(model, x)."
)


class _FolderError(InspectorError, IsADirectoryError):
    """A folder in place of a file; also an OSError, as `open` would raise."""

"""Recording files made by hand and by mutation, with correct checksums."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import struct
import tempfile
import zlib
from typing import Any

import safetensors.numpy
from summaries import all_summaries, some_facts, some_statistics

from nnx_inspector.recordings.recording import Recording

MAGIC = b"nnx_inspector recording 1\n"
Part = tuple[bytes, int, bytes]
"""Kind, flags and body of a section."""


def file_of(parts: list[Part]) -> bytes:
    """A file with correct checksums, whatever its content."""
    out, check = MAGIC, zlib.crc32(MAGIC)
    for kind, flags, body in parts:
        head = struct.pack("<4sIQI", kind, flags, len(body), zlib.crc32(body))
        check = zlib.crc32(head, check)
        out += head + struct.pack("<I", check) + body
    return out


def parts_of(data: bytes) -> list[Part]:
    """The sections of a whole file."""
    at, found = len(MAGIC), list[Part]()
    while at < len(data):
        kind, flags, length, _, _ = struct.unpack_from("<4sIQII", data, at)
        found.append((kind, flags, data[at + 24 : at + 24 + length]))
        at += 24 + length
    return found


def fill(recording: Recording, steps: range, *, hold: bool = False) -> None:
    """One small pass per step, with everything that a pass can have."""
    summaries = all_summaries()
    recording.learn(some_facts(1))
    for i in steps:
        of = {"ab"[i % 2]: {"output": summaries[4 + i]}}
        marks: Any = {"kind": f"k{i % 3}", "perturbed": i % 3 == 1, "setting": i}
        if hold:  # one of them is incomplete
            recording.hold(i, i, {} if i == 5 else of, **marks)
        points = {"loß": float("nan") if i == 3 else i}
        marks["figures"] = some_statistics(i) if i % 2 else None
        recording.append(i, of, metrics=points, held=i if hold else None, **marks)


@functools.cache
def small_file() -> bytes:
    """A file that was saved and then appended to; older passes were dropped before and after."""
    recording = Recording(max_steps=3)
    fill(recording, range(4))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.nni")
        recording.attach(path, print)
        fill(recording, range(4, 7), hold=True)
        recording.detach()
        return path.read_bytes()


def header_and_data(body: bytes) -> tuple[bytes, bytes]:
    """Header and data of a safetensors blob."""
    length = int.from_bytes(body[:8], "little")
    return body[8 : 8 + length], body[8 + length :]


def blob_of(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutated(random: random.Random) -> bytes:
    """The small file, changed in one of many ways, mostly with correct checksums."""
    data, parts = small_file(), parts_of(small_file())
    at = random.randrange(len(parts))
    kind, flags, body = parts[at]
    match random.randrange(10):
        case 0:
            return _corrupted_bytes(random, data)
        case 1:
            return data[: random.randrange(len(data))]
        case 2:
            del parts[at]
        case 3:
            parts.insert(random.randrange(len(parts)), parts[at])
        case 4:
            random.shuffle(parts)
        case 5:
            other = random.choice(parts)[0]
            parts[at] = random.choice([other, b"????"]), random.randrange(2), body
        case 6:
            parts[at] = kind, flags, _corrupted_bytes(random, body)
        case 7:
            header, rest = header_and_data(body)
            parts[at] = kind, flags, blob_of(_corrupted_bytes(random, header), rest)
        case 8:
            header, rest = header_and_data(body)
            parts[at] = kind, flags, blob_of(_wrong_header(random, json.loads(header)), rest)
        case _:
            columns = {n: c.copy() for n, c in safetensors.numpy.load(body).items()}
            column = columns[random.choice(list(columns))]
            raw = column.reshape(-1).view("uint8")
            for _ in range(random.randint(1, 3)):
                if len(raw):
                    raw[random.randrange(len(raw))] = random.choice([0, 1, 127, 128, 255])
            parts[at] = kind, flags, safetensors.numpy.save(columns)
    return file_of(parts)


def _corrupted_bytes(random: random.Random, data: bytes) -> bytes:
    """Some bytes changed, removed, doubled, inserted or zeroed."""
    out = bytearray(data)
    for _ in range(random.randint(1, 3)):
        start = random.randrange(len(out) + 1)
        stop = min(len(out), start + random.choice([1, 1, 1, 4, 8, 100]))
        choice = random.randrange(5)
        if choice == 0:
            out[start:stop] = random.randbytes(stop - start)
        elif choice == 1:
            del out[start:stop]
        elif choice == 2:
            out[start:start] = out[start:stop]
        elif choice == 3:
            out[start:start] = random.randbytes(stop - start)
        else:
            out[start:stop] = bytes(stop - start)
    return bytes(out)


def _wrong_header(random: random.Random, header: dict[str, dict[str, object]]) -> object:
    """Shapes, offsets and types that do not match the data."""
    name = random.choice(list(header))
    numbers = [0, -1, 1, 2**31, 2**32, 2**63, 2**64 - 1, 10**30, 1.5, None, "1", [], True]
    field = random.choice(["dtype", "shape", "data_offsets"])
    if field == "dtype":
        kinds = ["F64", "U8", "I64", "U32", "BOOL", "BF16", "F4", "F8_E5M2", "C64", "", 7]
        header[name][field] = random.choice(kinds)
    else:
        count = random.choice([0, 1, 2, 2, 3, 40])
        header[name][field] = [random.choice(numbers) for _ in range(count)]
    if random.random() < 0.2:
        header[random.choice(["x", "__metadata__", name + "2"])] = header[name]
    return header

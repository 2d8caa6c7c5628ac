"""Messages to JSON headers and back, checked field by field.

Invariant: a header is valid JSON (never NaN), and input from a browser is either a message with
the declared types or a `ProtocolError` of bounded length.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import numpy as np

from nnx_inspector.screen.protocol import constants

MESSAGES: Final[dict[str, type[Message]]] = {}
"""The class of each message, by its `type`."""


T = typing.TypeVar("T", bound="Struct")


class ProtocolError(ValueError):
    """A message does not fit its type. The error's text is bounded, whatever the message held."""

    def __init__(self, text: str):
        super().__init__(
            text if len(text) <= constants.LONGEST_ERROR else f"{text[: constants.LONGEST_ERROR]} …"
        )


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Struct:
    """A part of a message, or a message. Every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class Message(Struct):
    """What crosses between kernel and browser; `type` is its name there."""

    type: ClassVar[str]

    def __init_subclass__(cls, *, type: str = "") -> None:
        super().__init_subclass__()
        if type:
            cls.type, MESSAGES[type] = type, cls


class ToBrowser(Message):
    """Kernel to browser."""

    version: int = constants.VERSION


class StudyMessage(ToBrowser):
    """What a study found last. `source` names the pass or the data; `error` says why it found
    nothing. `batch` is the number of the batch, as in `Inputs`; -1 for other data.
    """

    running: bool
    error: str
    source: str
    batch: int = -1


class ToKernel(Message):
    """Browser to kernel."""


class Request(ToKernel):
    """Browser to kernel: what one `Reply` with this `id` answers."""

    id: int


def buffer_of(*parts: object) -> bytes:
    """The binary part of a message: bytes as they are, and arrays of uint8 or else float64, one
    after the other, little-endian throughout.
    """
    kinds = ["u1" if getattr(part, "dtype", None) == np.uint8 else "<f8" for part in parts]
    return b"".join(
        part if isinstance(part, bytes) else np.ascontiguousarray(part, kind).tobytes()
        for part, kind in zip(parts, kinds, strict=True)
    )


def finite(number: float | None) -> float | None:
    """A figure of a message; None if it is not known or not finite."""
    return None if number is None or not math.isfinite(number) else float(number)


def to_header(message: Message) -> dict[str, Any]:
    """The JSON header of a message.

    Floats that are not finite become None, so a header is always valid JSON.
    """
    header = to_fields(message)
    header["type"] = message.type
    return header


def to_fields(value: object) -> Any:
    """A struct as JSON, as in the header of a message that holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_fields(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_fields(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and not value.isascii():
        # half of a surrogate pair, which a Python name may hold, cannot be encoded
        return value.encode("utf-8", "replace").decode("utf-8")
    return value


def from_header(header: object) -> Message:
    """The message of a JSON header, checked field by field.

    Raises:
        ProtocolError: the header is not an object, its type is unknown, or a field is missing,
            unknown, not of its declared type, or too large.
    """
    if not isinstance(header, Mapping):
        raise ProtocolError(f"A message must be an object, got {type(header).__name__}.")
    kind = header.get("type")
    cls = MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"Unknown message type {_repr(kind)}.")
    return struct_of(cls, {k: v for k, v in header.items() if k != "type"}, cls.type)


def struct_of(cls: type[T], fields: object, where: str = "") -> T:
    """A struct, or a message, of its fields, which are checked.

    Raises:
        ProtocolError: they are not the fields of the struct; see `from_header`.
    """
    where = where or cls.__name__
    if not isinstance(fields, Mapping):
        raise ProtocolError(f"{where} must be an object, got {type(fields).__name__}.")
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    if missing := names - fields.keys():
        raise ProtocolError(f"Message {where!r} lacks {sorted(missing)}.")
    if unknown := fields.keys() - names:
        raise ProtocolError(f"Message {where!r} has unknown fields {sorted(unknown)}.")
    return cls(**{n: _checked(hints[n], fields[n], f"{where}.{n}") for n in names})


def _checked(hint: Any, value: object, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        words = typing.get_args(hint)
        if not isinstance(value, str) or value not in words:
            listed = " or ".join(map(repr, words))
            raise ProtocolError(f"{where} must be {listed}, got {_repr(value)}.")
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _checked(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ProtocolError(f"{where} must be a list, got {type(value).__name__}.")
        item = typing.get_args(hint)[0]
        return tuple(_checked(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} must be an object, got {type(value).__name__}.")
        item = typing.get_args(hint)[1]
        return {str(k): _checked(item, v, f"{where}[{k!r}]") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return struct_of(typing.cast(type, hint), value, where)
    if hint is float and type(value) is int:  # JavaScript writes 1e20 so
        value = float(value) if abs(value) < 10**308 else math.inf
    if type(value) is int and abs(value) > constants.LARGEST_INTEGER:
        raise ProtocolError(f"{where} must lie within 2**53 of 0.")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ProtocolError(f"{where} must be {hint.__name__}, got {type(value).__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"{where} must be finite.")
    if isinstance(value, str) and len(value) > constants.LONGEST_INPUT:
        raise ProtocolError(
            f"{where} has {len(value)} characters, more than {constants.LONGEST_INPUT}."
        )
    return value


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or very deep lists
        return f"a very long {type(value).__name__}"


def to_json(message: Message) -> str:
    """The header as text, for the golden messages."""
    return json.dumps(to_header(message), allow_nan=False, ensure_ascii=False, sort_keys=True)

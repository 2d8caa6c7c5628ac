"""What a click does, as the Python text that does the same in a cell where `insp` is the inspector.

Invariant: a text is valid Python, with every digit, or "" where none can be written (an array of
the user's, a function). Runs nothing; knows no model.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnx_inspector.arrays import is_array
from nnx_inspector.screen import protocol


def quoted(text: str) -> str:
    """A text as a Python literal, in double quotes."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)


def perturbation_text(perturbation: Any) -> str:
    """The text that makes an equal perturbation, or "".

    Example:
        >>> import nnx_inspector as nni
        >>> perturbation_text(nni.Scale(0.1))
        'nni.Scale(factor=0.1)'
    """
    cls = type(perturbation)
    if not cls.__module__.startswith("nnx_inspector"):
        return ""
    parts = {
        field.name: getattr(perturbation, field.name)
        for field in dataclasses.fields(perturbation)
        if not _is_default(getattr(perturbation, field.name), field.default)
    }
    if cls.__name__ == "Mask" and (off := _off(parts["mask"])) is not None:
        rest = {name: value for name, value in parts.items() if name != "mask"}
        return _call("Mask.without", [str(off[0])], {"units": off[1], **rest})
    return _call(cls.__name__, [], parts)


def addition(site: str, sites: Sequence[str], perturbation: Any) -> str:
    """The text that adds a perturbation, or "".

    Args:
        site: the selection that it was made with, in words.
        sites: the sites that it acts on.
        perturbation: what is done.
    """
    text = perturbation_text(perturbation)
    if not text:
        return ""
    # a selection that was no glob is told by its sites
    by_name = len(sites) > 1 and site.startswith(", ".join(sites))
    where = f"[{', '.join(map(quoted, sites))}]" if by_name else quoted(site)
    return f"insp.perturb({where}, {text})"


def text_of(message: Any, handles: Sequence[Any], made: Any = None) -> str:
    """The text that does what a command of the browser asks, or "".

    Args:
        message: of the browser.
        handles: the inspector's, before the command.
        made: the perturbation that the command adds, sets or sweeps with.
    """
    if isinstance(message, protocol.Select):
        return f"insp.selected = {quoted(message.site)}"
    if isinstance(message, protocol.Perturb):
        return addition(message.site, (message.site,), made)
    if isinstance(message, protocol.SwitchAll):
        return f"insp.switch_all({message.enabled})"
    if isinstance(message, protocol.SwitchMode):
        name, value = message.name, message.value
        mode = f"{name}={value}" if _is_keyword(name) else f"**{{{quoted(name)}: {value}}}"
        return f"insp.modes.set({quoted(message.module)}, {mode})"
    if isinstance(message, protocol.StartSweep):
        return f"insp.sweep({quoted(message.sites)}, {perturbation_text(made)})"
    if isinstance(message, protocol.SetMask) and message.perturbation is None:
        return addition(message.site, (message.site,), made)
    if isinstance(message, (protocol.Adjust, protocol.Remove, protocol.SetMask)):
        numbers = [handle.id for handle in handles]
        if message.perturbation not in numbers:
            return ""
        handle = f"insp.perturbations[{numbers.index(message.perturbation)}]"
        return _of_handle(handle, handles[numbers.index(message.perturbation)], message, made)
    return ""


def _is_keyword(name: str) -> bool:
    """Whether a name can be that of a keyword argument; normalised, it would be another name."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and name != "only"


def _of_handle(name: str, handle: Any, message: Any, made: Any) -> str:
    if isinstance(message, protocol.Remove):
        return f"{name}.remove()"
    if isinstance(message, protocol.SetMask):
        text = perturbation_text(made)
        return f"{name}.perturbation = {text}" if text else ""
    if message.strength is None or message.strength == handle.strength:
        return f"{name}.enabled = {message.enabled}"
    text = f"{name}.strength = {message.strength!r}"
    return (
        text if message.enabled == handle.enabled else f"{text}; {name}.enabled = {message.enabled}"
    )


def _call(name: str, parts: list[str], named: dict[str, Any]) -> str:
    values = {key: _text(value) for key, value in named.items()}
    if "" in values.values():
        return ""
    return f"nni.{name}({', '.join([*parts, *(f'{k}={v}' for k, v in values.items())])})"


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, (str, int, float, tuple, type(None)))
    return plain and type(value) is type(default) and value == default


def _text(value: Any) -> str:
    if isinstance(value, (bool, int, float, type(None))):
        return repr(value) if not isinstance(value, float) or math.isfinite(value) else ""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        inner = [_text(one) for one in value]
        return "" if "" in inner else f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if is_array(value) and value.shape == ():
        return _text(value.item()) if value.dtype.kind in "fiub" else ""
    return quoted(value.name) if isinstance(value, np.dtype) else ""


def _off(mask: Any) -> tuple[list[int], int] | None:
    """The units that a boolean mask along one axis switches off, and how many there are."""
    values = np.asarray(mask)
    if values.dtype != np.bool_ or values.ndim != 1:
        return None
    return np.flatnonzero(~values).tolist(), len(values)

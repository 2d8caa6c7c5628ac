"""What the screen may add, made from a click, and any perturbation, as the screen shows it.

Invariant: of the strength that is shown, `tuned` sets exactly that number and nothing else.
Imports jax only when something is made; knows no sites, models or programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, Protocol

from nnx_inspector.arrays import is_array, own_attribute, shape_of
from nnx_inspector.screen import protocol
from nnx_inspector.screen.expressions import addition

_OFFERS = {offer.kind: offer for offer in protocol.OFFERS}
_ELSEWHERE = protocol.Offer(
    kind="ParameterNoise", group="value", does="", strength_name="std", strength=0.1, high=1.0
)
"""The kind that has a strength and is not on the menu."""


class Shown(Protocol):
    """What is read of a handle."""

    @property
    def id(self) -> int: ...
    @property
    def site(self) -> str: ...
    @property
    def sites(self) -> Iterable[str]: ...
    @property
    def perturbation(self) -> Any: ...
    @property
    def enabled(self) -> bool: ...


def made(kind: str, strength: float | None, at: str) -> Any:
    """The perturbation that a click asks for.

    Args:
        kind: of `protocol.OFFERS`.
        strength: None for the offer's own.
        at: "output" or "input".

    Raises:
        ValueError: there is no such offer, it has no strength, or none as low as that.
    """
    offer = _OFFERS.get(kind)
    if offer is None:
        raise ValueError(
            f"There is no perturbation {kind!r} on the menu. There are {', '.join(_OFFERS)}; "
            f"others are added in Python, by insp.perturb."
        )
    if strength is not None and not offer.strength_name:
        raise ValueError(f"{kind} has no strength to set.")
    import jax.numpy as jnp

    from nnx_inspector.perturbations import gradients as gradient_kinds
    from nnx_inspector.perturbations import values as kinds

    cls = getattr(kinds, kind, None) or getattr(gradient_kinds, kind)
    number = offer.strength if strength is None else strength
    if kind == "Clamp":
        return _clamped(cls, number, at)
    if kind == "Shift":
        return cls(1.0, strength=number, at=at)
    if kind == "Cast":
        return cls(jnp.bfloat16, at=at)
    return cls(at=at) if number is None else cls(number, at=at)


def tuned(perturbation: Any, strength: float) -> Any:
    """The same perturbation with another strength.

    Raises:
        ValueError: it has no strength that is one number, or none as low as that.
    """
    name, _ = _strength_of(perturbation)
    if not name:
        raise ValueError(f"{expression(perturbation)} has no strength that is one number.")
    if name == "limit":
        return _clamped(type(perturbation), strength, perturbation.at)
    return dataclasses.replace(perturbation, **{name: strength})


def strength_of(perturbation: Any) -> float | None:
    """The one number of a perturbation that can be tuned, or None."""
    return _strength_of(perturbation)[1]


def masked(bits: str, units: int) -> Any:
    """The boolean mask of a click, from its bits as in `protocol.Perturbation.mask`.

    Raises:
        ValueError: they are not so many, or no bits.
    """
    import numpy as np

    if not 0 < units <= protocol.MOST_UNITS:
        raise ValueError(f"A mask has 1 to {protocol.MOST_UNITS} units here, got {units}.")
    packed = np.frombuffer(bytes.fromhex(bits), np.uint8)
    if len(packed) != -(-units // 8):
        raise ValueError(f"{units} units are {-(-units // 8)} bytes of bits, got {len(packed)}.")
    return np.unpackbits(packed, count=units).astype(np.bool_)


def _clamped(cls: Any, limit: Any, at: str) -> Any:
    if limit < 0:
        raise ValueError(f"Clamp takes a limit of at least 0.0, got {limit}.")
    return cls(-limit, limit, at=at)


class Showing:
    """Handles, as the screen shows them. A perturbation is looked at once: a mask or a number may
    be on a device, and a State is sent many times a second.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, protocol.Perturbation]] = {}

    def of(self, handles: Iterable[Shown], *, pending: bool) -> tuple[protocol.Perturbation, ...]:
        """The handles, in their order; `pending` is so of all of them."""
        now: dict[int, tuple[Any, protocol.Perturbation]] = {}
        for handle in handles:
            perturbation, looks = self._seen.get(handle.id, (None, None))
            if looks is None or perturbation is not handle.perturbation:
                perturbation = handle.perturbation
                looks = _looks(handle, perturbation)
            looks = dataclasses.replace(
                looks,
                enabled=handle.enabled,
                pending=pending,
                compiling=getattr(handle, "compiling", False),
                not_acting=getattr(handle, "not_acting", ""),
            )
            now[handle.id] = (perturbation, looks)
        self._seen = now
        return tuple(looks for _, looks in now.values())


def _looks(handle: Shown, perturbation: Any) -> protocol.Perturbation:
    name, strength = _strength_of(perturbation)
    offer = _offer(type(perturbation).__name__)
    layer = "".join(f"[{i}]" for i in getattr(handle, "rows", ()))
    sites = tuple(f"{site}{layer}" for site in handle.sites)
    mask = _mask(perturbation)
    units, off = (0, 0) if mask is None else (len(mask), int((~mask).sum()))
    return protocol.Perturbation(
        id=handle.id,
        site=handle.site,
        sites=sites[: protocol.MOST_SITES],
        reach=len(sites),
        kind=type(perturbation).__name__,
        at=getattr(perturbation, "at", "parameter"),
        acts_on=_acts_on(perturbation),
        expression=expression(perturbation),
        strength=strength,
        strength_name=name,
        low=offer.low if name and offer else 0.0,
        high=offer.high if name and offer else 0.0,
        units=units,
        units_off=off,
        mask=_bits(mask, perturbation),
        python=addition(handle.site, sites, perturbation),
        enabled=False,
        pending=False,
        compiling=False,
        not_acting="",
    )


def expression(perturbation: Any) -> str:
    """The Python text of a perturbation; arrays are their dtype and shape.

    Example:
        >>> import nnx_inspector as nni
        >>> expression(nni.Noise(0.1, seed=3, at="input"))
        "nni.Noise(std=0.1, seed=3, at='input')"
    """
    values = {f: getattr(perturbation, f.name) for f in dataclasses.fields(perturbation)}
    parts = [
        f"{field.name}={_text(value)}"
        for field, value in values.items()
        if not (isinstance(value, (str, int, tuple, NoneType)) and value == field.default)
    ]
    cls = type(perturbation)
    prefix = "nni." if cls.__module__.startswith("nnx_inspector") else ""
    return f"{prefix}{cls.__name__}({', '.join(parts)})"


def _text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.6g}" if f"{value:.6g}" != f"{value:.0f}" else f"{value:.1f}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if is_array(value):
        if value.shape == () and (number := _number(value)) is not None:
            return _text(number)
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    name = own_attribute(value, "__name__") or own_attribute(value, "name")
    return name if isinstance(name, str) else type(value).__name__


def _acts_on(perturbation: Any) -> Literal["value", "gradient", "parameter"]:
    from nnx_inspector.perturbations.gradients import GradientPerturbation

    if not hasattr(perturbation, "at"):
        return "parameter"
    return "gradient" if isinstance(perturbation, GradientPerturbation) else "value"


def _offer(kind: str) -> protocol.Offer | None:
    return _ELSEWHERE if kind == _ELSEWHERE.kind else _OFFERS.get(kind)


def _strength_of(perturbation: Any) -> tuple[str, float | None]:
    """The name and value of the one number that can be tuned; "" and None: there is none."""
    offer = _offer(type(perturbation).__name__)
    if offer is None or not offer.strength_name:
        return "", None
    if offer.strength_name == "limit":
        low, high = _number(perturbation.low), _number(perturbation.high)
        symmetric = low is not None and high is not None and low == -high
        return ("limit", high) if symmetric else ("", None)
    number = _number(getattr(perturbation, offer.strength_name))
    return ("", None) if number is None else (offer.strength_name, number)


def _number(value: Any) -> float | None:
    """A value that is one number, or None."""
    if isinstance(value, bool) or shape_of(value) != ():
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if is_array(value) and value.dtype.kind in "fiu" else None


def _mask(perturbation: Any) -> Any:
    """A boolean mask along one axis, or None."""
    import numpy as np

    mask = getattr(perturbation, "mask", None)
    if type(perturbation).__name__ != "Mask" or mask is None:
        return None
    values = np.asarray(mask)
    return values if values.dtype == np.bool_ and values.ndim == 1 else None


def _bits(mask: Any, perturbation: Any) -> str:
    import numpy as np

    if mask is None or len(mask) > protocol.MOST_UNITS or perturbation.axis != -1:
        return ""
    return np.packbits(mask).tobytes().hex()

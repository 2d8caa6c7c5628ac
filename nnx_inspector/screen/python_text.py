"""Clicks as Python: the kinds on the menu, perturbations on screen, and the text of each click.

The text is for a cell in which `insp` is the inspector. Invariant: it is valid Python, or "" if
none can be written (for a user's array or a function). The class of a kind defines its name and how
it is tuned. Imports jax only when something is made; runs nothing; knows no model.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import keyword
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from nnx_inspector.screen import protocol

if TYPE_CHECKING:
    from nnx_inspector.perturbations.base import At, Perturbation
    from nnx_inspector.perturbations.places import AnyPerturbation


def offers() -> dict[protocol.Offer, type[Perturbation]]:
    """The kinds that a click can add, in the menu's order, with their classes. Python has more."""
    from nnx_inspector.perturbations import activations, gradients
    from nnx_inspector.perturbations.base import Perturbation

    found = {}
    for module in (activations, gradients):
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(kind, Perturbation):
                continue
            if kind.form.does and kind.acts_on != "parameter":
                form = {n: v for n, v in vars(kind.form).items() if n != "given"}
                found[protocol.Offer(kind=kind.__name__, group=kind.acts_on, **form)] = kind
    return found


def perturbation_of_click(kind: str, strength: float | None, at: At) -> Perturbation:
    """The perturbation that a click asks for; a `strength` of None means the offer's default.

    Raises:
        ValueError: there is no such offer, it has no strength, or the strength is too low.
    """
    classes = {offer.kind: cls for offer, cls in offers().items()}
    if kind not in classes:
        raise ValueError(
            f"There is no perturbation {kind!r} on the menu. It has {', '.join(classes)}; "
            f"insp.perturb adds others in Python."
        )
    if strength is not None and not classes[kind].form.strength_name:
        raise ValueError(f"{kind} has no strength to set.")
    return classes[kind].clicked(strength, at)


def parse_perturbation(text: str) -> AnyPerturbation:
    """The perturbation that a text of `Kind.python` makes. It runs no other Python than that.

    Raises:
        ValueError: it is no such text.
    """
    from nnx_inspector.perturbations import activations, gradients, parameters
    from nnx_inspector.perturbations.base import Kind

    modules = (activations, gradients, parameters)
    kinds = {n: kind for module in modules for n, kind in vars(module).items()}

    def made_by(node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="nni"), attr=name)):
                maker = kinds.get(name)
                is_kind = isinstance(maker, type) and issubclass(maker, Kind)
            case ast.Call(func=ast.Attribute(value=of, attr="only" | "without" as name)):
                is_mask = isinstance(of, ast.Attribute) and of.attr == "Mask"
                owner = kinds["Mask"] if is_mask else made_by(of)
                maker, is_kind = getattr(owner, name, None), is_mask == (name == "without")
            case _:
                raise ValueError(f"{text!r} makes no perturbation of this package.")
        if not is_kind or not callable(maker):
            raise ValueError(f"{text!r} makes no perturbation of this package.")
        named = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
        return maker(*map(ast.literal_eval, node.args), **named)

    return made_by(ast.parse(text, mode="eval").body)


def mask_of_bits(bits: str, units: int, columns: int = 0) -> npt.NDArray[np.bool_]:
    """The boolean mask of a click, from its bits as in `protocol.Perturbation.mask`.

    Raises:
        ValueError: `bits` is not hexadecimal, not of the length for `units` bits, or no whole rows.
    """
    if not 0 < units <= protocol.MOST_UNITS:
        raise ValueError(f"A mask has 1 to {protocol.MOST_UNITS} units here, got {units}.")
    packed = np.frombuffer(bytes.fromhex(bits), np.uint8)
    if len(packed) != -(-units // 8):
        raise ValueError(f"{units} units need {-(-units // 8)} bytes of bits, got {len(packed)}.")
    on = np.unpackbits(packed, count=units).astype(np.bool_)
    return on.reshape(-1, columns) if columns else on


class HandleLike(Protocol):
    """The properties that are read of a handle."""

    @property
    def id(self) -> int: ...
    @property
    def site(self) -> str: ...
    @property
    def sites(self) -> Iterable[str]: ...
    @property
    def perturbation(self) -> AnyPerturbation: ...
    @property
    def enabled(self) -> bool: ...


class PerturbationMessages:
    """Turns handles into messages. Reads each perturbation once, as it may be on a device."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[AnyPerturbation, protocol.Perturbation]] = {}

    def of(
        self, handles: Iterable[HandleLike], *, pending: bool
    ) -> tuple[protocol.Perturbation, ...]:
        """The handles in their order, all with the same `pending`."""
        now: dict[int, tuple[AnyPerturbation, protocol.Perturbation]] = {}
        for handle in handles:
            perturbation = handle.perturbation
            seen, message = self._seen.get(handle.id, (None, None))
            if message is None or seen is not perturbation:
                message = _message_of(handle, perturbation)
            message = dataclasses.replace(
                message,
                enabled=handle.enabled,
                pending=pending,
                compiling=getattr(handle, "compiling", False),
                not_acting=getattr(handle, "not_acting", ""),
            )
            now[handle.id] = (perturbation, message)
        self._seen = now
        return tuple(message for _, message in now.values())


def _message_of(handle: HandleLike, perturbation: AnyPerturbation) -> protocol.Perturbation:
    strength, form = perturbation.tuned_to, perturbation.form
    layer = "".join(f"[{i}]" for i in getattr(handle, "rows", ()))
    sites = tuple(f"{site}{layer}" for site in handle.sites)
    on = perturbation.switches
    return protocol.Perturbation(
        id=handle.id,
        site=handle.site,
        sites=sites[: protocol.MOST_SITES],
        reach=len(sites),
        kind=perturbation.kind_name,
        at=perturbation.at,
        acts_on=perturbation.acts_on,
        expression=perturbation.python(short=True),
        strength=strength,
        strength_name="" if strength is None else form.strength_name,
        low=0.0 if strength is None else form.low,
        high=0.0 if strength is None else form.high,
        units=0 if on is None else on.size,
        units_off=0 if on is None else int((~on).sum()),
        mask="" if on is None or on.size > protocol.MOST_UNITS else np.packbits(on).tobytes().hex(),
        python=perturb_text(handle.site, sites, perturbation),
        enabled=False,
        pending=False,
        compiling=False,
        not_acting="",
        axis=-1 if on is None else getattr(perturbation, "axis", -1),
        columns=on.shape[1] if on is not None and on.ndim == 2 else 0,
    )


def quoted(text: str) -> str:
    """A text as a Python literal, in double quotes."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)


def perturb_text(site: str, sites: Sequence[str], perturbation: AnyPerturbation) -> str:
    """The text that adds a perturbation, or ""; `site` is the selection that it was made with, in
    words.
    """
    text = perturbation.python()
    if not text:
        return ""
    # a selection other than a glob is written as a list of its sites
    by_name = len(sites) > 1 and site.startswith(", ".join(sites))
    where = f"[{', '.join(map(quoted, sites))}]" if by_name else quoted(site)
    return f"insp.perturb({where}, {text})"


def text_of(message: Any, handles: Sequence[Any], made: Any = None) -> str:
    """The text that does the same as a command of the browser, or "".

    `handles` are those before the command; `made` is the perturbation that it adds, sets or sweeps
    with.
    """
    if isinstance(message, protocol.Select):
        return f"insp.selected = {quoted(message.site)}"
    if isinstance(message, protocol.Perturb):
        return perturb_text(message.site, (message.site,), made)
    if isinstance(message, protocol.SwitchAll):
        return f"insp.switch_all({message.enabled})"
    if isinstance(message, protocol.SwitchMode):
        name, value = message.name, message.value
        mode = f"{name}={value}" if _is_keyword(name) else f"**{{{quoted(name)}: {value}}}"
        return f"insp.modes.set({quoted(message.module)}, {mode})"
    if isinstance(message, protocol.ShowOperations):
        hidden = "" if message.shown else ", shown=False"
        return f"insp.show_operations({quoted(message.site)}{hidden})"
    if isinstance(message, protocol.StartSweep):
        what = "" if made is None else f", {made.python()}"
        return f"insp.sweep({quoted(message.sites)}{what})"
    if isinstance(message, protocol.Study):
        return _study_text(message)
    if isinstance(message, protocol.SetMask) and message.perturbation is None:
        return perturb_text(message.site, (message.site,), made)
    if isinstance(message, (protocol.Adjust, protocol.Remove, protocol.SetMask)):
        numbers = [handle.id for handle in handles]
        if message.perturbation not in numbers:
            return ""
        handle = f"insp.perturbations[{numbers.index(message.perturbation)}]"
        return _handle_text(handle, handles[numbers.index(message.perturbation)], message, made)
    return ""


def _study_text(asked: protocol.Study) -> str:
    """The text that makes a study; a position is read off its result."""
    of_example = f'.to_frame().query("example == {asked.example}")' if asked.example else ""
    if asked.what == "examples":
        axis = f", axis={asked.axis}" * (asked.axis != -1)
        return f"insp.examples(None, {quoted(asked.site)}, {asked.unit}{axis})"
    if asked.what == "attribution":
        given = {"output": asked.token, "method": quoted(asked.method)}
        given |= {} if asked.position == -1 else {"position": asked.position}
        return f"insp.attribute({_keywords(given)}){of_example}"
    norm = "False" if asked.norm == "none" else quoted(asked.norm) if asked.norm else None
    read = {"unembed": quoted(asked.unembed) if asked.unembed else None, "norm": norm}
    name, token = ("lens", "answer") if asked.what == "lens" else ("logit_attribution", "token")
    return f"insp.{name}({_keywords({token: asked.token, **read})}){of_example}"


def _keywords(given: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)


def _is_keyword(name: str) -> bool:
    """Whether a name can be written as a keyword; Python normalises names that are not ASCII."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and name != "only"


def _handle_text(name: str, handle: Any, message: Any, made: Any) -> str:
    if isinstance(message, protocol.Remove):
        return f"{name}.remove()"
    if isinstance(message, protocol.SetMask):
        text = made.python()
        return f"{name}.perturbation = {text}" if text else ""
    if message.strength is None or message.strength == handle.strength:
        return f"{name}.enabled = {message.enabled}"
    text = f"{name}.strength = {message.strength!r}"
    return (
        text if message.enabled == handle.enabled else f"{text}; {name}.enabled = {message.enabled}"
    )

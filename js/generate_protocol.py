"""Writes what the front end knows of the protocol: `src/protocol.ts` and the golden messages.

`nnx_inspector/protocol.py` is the authority; nothing written here is edited by hand. It is loaded
from its file, so that this runs where jax is not installed. Invariant: the output depends on that
file alone, byte for byte; `--check` says (exit 1) when what is on disk differs from it.

    python js/generate_protocol.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
import types
import typing
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent / "nnx_inspector" / "protocol.py"
SCALARS = {str: ("str", "string"), int: ("int", "number"), float: ("float", "number")}
SCALARS[bool] = ("bool", "boolean")


def load_protocol() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("nnx_inspector_protocol", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def describe(hint: Any) -> tuple[str, str]:
    """A field's type as a shape for `validate.ts`, and as TypeScript.

    Shapes: a scalar, a struct's name or words (`a|b`, at least two), then any of `?`
    (or null), `[]` (list of), `{}` (map of).
    """
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        words = typing.get_args(hint)
        return "|".join(words), " | ".join(f'"{word}"' for word in words)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [h for h in typing.get_args(hint) if h is not type(None)]
        shape, script = describe(inner)
        return f"{shape}?", f"{script} | null"
    if origin is tuple:
        shape, script = describe(typing.get_args(hint)[0])
        return f"{shape}[]", f"readonly {script}[]"
    if origin is dict:
        shape, script = describe(typing.get_args(hint)[1])
        return f"{shape}{{}}", f"Readonly<Record<string, {script}>>"
    if dataclasses.is_dataclass(hint):
        return hint.__name__, hint.__name__
    return SCALARS[hint]


def structs(protocol: types.ModuleType) -> list[type]:
    """Every dataclass of the protocol, in the order of the file."""
    return [
        value
        for value in vars(protocol).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == protocol.__name__
    ]


def typescript(protocol: types.ModuleType) -> str:
    lines = [
        "// The messages between kernel and browser, as types, constants and a table of shapes.",
        "// Generated from nnx_inspector/protocol.py by generate_protocol.py: never edit by hand.",
        "",
        f"export const VERSION = {protocol.VERSION};",
    ]
    for name in ("QUANTITIES", "STATISTICS", "HISTORY_QUANTILES"):
        items = ", ".join(
            f'"{v}"' if isinstance(v, str) else repr(v) for v in getattr(protocol, name)
        )
        lines.append(f"export const {name} = [{items}] as const;")
    lines += [
        f"export const {name} = {getattr(protocol, name)};" for name in ("SPARK", "HISTORY_BINS")
    ]
    lines += [
        "",
        "export type Quantity = (typeof QUANTITIES)[number];",
        "export type Statistic = (typeof STATISTICS)[number];",
    ]
    table = []
    for cls in structs(protocol):
        hints = typing.get_type_hints(cls)
        fields = {f.name: describe(hints[f.name]) for f in dataclasses.fields(cls)}
        doc = " ".join((cls.__doc__ or "").split()).replace("*/", "* /")
        lines += ["", f"/** {doc} */", f"export interface {cls.__name__} {{"]
        if hasattr(cls, "type"):
            lines.append(f'  readonly type: "{cls.type}";')
        lines += [f"  readonly {name}: {script};" for name, (_, script) in fields.items()]
        lines.append("}")
        entries = ", ".join(f'{name}: "{shape}"' for name, (shape, _) in fields.items())
        table.append(f"  {cls.__name__}: {{ {entries} }},")
    for name, group in (("ToBrowser", protocol.TO_BROWSER), ("ToKernel", protocol.TO_KERNEL)):
        lines += ["", f"export type {name} = {' | '.join(c.__name__ for c in group)};"]
    lines += [
        "",
        "/** The fields of every struct: a scalar, struct or a|b, then `?` null, `[]` list, `{}` map. */",
        "export const SHAPES: Readonly<Record<string, Readonly<Record<string, string>>>> = {",
        *table,
        "};",
    ]
    for name, group in (("TO_BROWSER", protocol.TO_BROWSER), ("TO_KERNEL", protocol.TO_KERNEL)):
        entries = ", ".join(f'{c.type}: "{c.__name__}"' for c in group)
        lines += [
            "",
            "/** The struct of every message type. */",
            f"export const {name}: Readonly<Record<string, string>> = {{ {entries} }};",
        ]
    lines += ["", "/** What a click can add, in the order of the menu. Python can do more. */"]
    lines.append("export const OFFERS: readonly Offer[] = [")
    for offer in protocol.OFFERS:
        fields = ", ".join(f"{k}: {json.dumps(v)}" for k, v in dataclasses.asdict(offer).items())
        lines.append(f"  {{ {fields} }},")
    lines.append("];")
    return "\n".join(lines) + "\n"


def goldens(protocol: types.ModuleType) -> dict[str, tuple[Any, bytes | None]]:
    """One example of every message, small enough to read, with its buffer.

    The numbers of a buffer count up (`ramp`), so that a test can say what belongs where.
    """
    p = protocol

    def ramp(*shape: int) -> np.ndarray:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 8

    site = p.Site(
        key="", name="CNN", kind="CNN", parent=-1, depth=0, inputs="float32[8,28,28,1]",
        output="float32[8,10]", parameters=1234, flops=1.5e6, calls=1, stacked=0, aliases=(),
        source="model.py:12", perturbable=True, unseen="",
    )  # fmt: skip
    hostile = dataclasses.replace(
        site, key="blocks/<img src=x onerror=alert(1)>", name="<b>0</b>", kind="Dense «ü»", parent=0,
        depth=1, flops=None, calls=2, stacked=12, aliases=("head", "tail"), perturbable=False,
        unseen="inside a while loop",
    )  # fmt: skip
    progress = p.Progress(kind="watch", running=True, step=7, total=100, rate=12.5)
    idle = p.Progress(kind="run", running=False, step=7, total=None, rate=None)
    table = ramp(2, len(p.QUANTITIES), len(p.STATISTICS))
    table[1, 1] = np.nan
    histograms = (np.array([[8.0, 3.0], [1016.0, 5.0]]), np.array([[3064.0, 2.0]]))
    sparklines = (np.arange(2 * len(p.QUANTITIES) * p.SPARK) % 256).reshape(2, -1, p.SPARK)
    frame = p.Frame(
        version=p.VERSION, seq=3, layout=1, step=7, perturbed=True,
        metrics={"loss": 0.25, "accuracy": float("nan")},
        histograms=(p.Histogram(site=1, quantity=0, bins=2), p.Histogram(site=1, quantity=1, bins=1)),
        progress=progress,
    )  # fmt: skip
    history = p.History(version=p.VERSION, layout=1, site=1, quantity=0, steps=2)
    curves = p.Curves(version=p.VERSION, names=("loss", "accuracy"), points=(3, 1))
    state = p.State(
        version=p.VERSION, seq=4, selected="blocks/0",
        perturbations=(
            p.Perturbation(
                id=1, site="blocks/0", sites=("blocks/0",), reach=1, kind="Zero", at="output",
                acts_on="value", expression="nni.Zero()", strength=None, strength_name="", low=0.0,
                high=0.0, units=0, units_off=0, enabled=True, pending=False, compiling=False,
            ),
            p.Perturbation(
                id=2, site="**", sites=("", "blocks/0"), reach=2, kind="ScaleGradient", at="input",
                acts_on="gradient", expression="nni.ScaleGradient(0.5, at='input')", strength=0.5,
                strength_name="factor", low=0.0, high=2.0, units=0, units_off=0, enabled=False,
                pending=True, compiling=True,
            ),
        ),
        training_perturbed=True, listening="during", compiling=1,
        effect=p.Effect(
            source="example", clean={"loss": 0.25}, perturbed={"loss": None}, output_change=0.125,
            kl=0.5, top1_changed=None, sites=(p.SiteEffect(site="blocks/1", change=1.5),),
        ),
        no_effect="", progress=idle,
        cost=p.Cost(plain_seconds=0.01, inspected_seconds=0.011, compilations=2, bytes_sent=4096,
                    frames_dropped=1, errors=0),
        notices=(p.Notice(level="warning", text="NaN at step 3", site="blocks/0"),),
        closed=False,
    )  # fmt: skip
    return {
        "layout": (p.Layout(version=p.VERSION, layout=1, model="CNN", sites=(site, hostile)), None),
        "frame": (frame, p.frame_buffer(table, histograms, sparklines)),
        "history": (
            history,
            p.history_buffer(
                np.array([5.0, 7.0]), ramp(2, len(p.HISTORY_QUANTILES)), ramp(p.HISTORY_BINS + 1),
                ramp(2, p.HISTORY_BINS),
            ),
        ),
        "curves": (curves, p.curves_buffer((np.array([[1, 0.5], [2, np.nan], [3, 0.25]]), np.array([[3, 1.0]])))),
        "state": (state, None),
        "reply": (p.Reply(id=9, ok=False, error="no site named 'x'"), None),
        "hello": (p.Hello(version=p.VERSION), None),
        "ack": (p.Ack(seq=3), None),
        "select": (p.Select(id=1, site="blocks/0"), None),
        "perturb": (p.Perturb(id=2, site="blocks/0", kind="Scale", strength=0.5, at="input"), None),
        "adjust": (p.Adjust(id=3, perturbation=1, enabled=True, strength=None), None),
        "switch_all": (p.SwitchAll(id=5, enabled=False), None),
        "remove": (p.Remove(id=4, perturbation=1), None),
    }  # fmt: skip


def outputs() -> dict[pathlib.Path, bytes]:
    protocol = load_protocol()
    files = {HERE / "src" / "protocol.ts": typescript(protocol).encode()}
    for name, (message, buffer) in goldens(protocol).items():
        files[HERE / "test" / "golden" / f"{name}.json"] = (
            protocol.to_json(message) + "\n"
        ).encode()
        if buffer is not None:
            files[HERE / "test" / "golden" / f"{name}.bin"] = buffer
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    check = parser.parse_args().check
    files = outputs()
    stale = [p for p, text in files.items() if not p.exists() or p.read_bytes() != text]
    known = set((HERE / "test" / "golden").glob("*")) - files.keys()
    if check:
        for path in sorted([*stale, *known]):
            print(f"{path.relative_to(HERE.parent)} is not what protocol.py says", file=sys.stderr)
        return 1 if stale or known else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    for path in known:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

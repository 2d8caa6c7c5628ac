"""Writes what the front end knows of the protocol: `src/kernel/protocol.ts` and the golden messages.

`nnx_inspector/screen/protocol` is the authority, and the kinds of perturbations for the menu; nothing
written here is edited by hand. Invariant: the output depends on those files alone, byte for byte; `--check` says (exit 1) when what
is on disk differs from it.

    python js/generate_protocol.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
FILES = ("state", "flow", "nnx", "panels", "comparison", "values", "inputs", "requests")
"""Those with messages, in the order in which they are written."""
SCALARS = {str: "string", int: "number", float: "number", bool: "boolean"}


def typescript_type(hint: Any) -> str:
    """A field's type as TypeScript."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " | ".join(f'"{word}"' for word in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        (inner,) = [h for h in typing.get_args(hint) if h is not type(None)]
        return f"{typescript_type(inner)} | null"
    if origin is tuple:
        script = typescript_type(typing.get_args(hint)[0])
        return f"readonly ({script})[]" if " " in script else f"readonly {script}[]"
    if origin is dict:
        return f"Readonly<Record<string, {typescript_type(typing.get_args(hint)[1])}>>"
    if dataclasses.is_dataclass(hint):
        return hint.__name__
    return SCALARS[hint]


def message_classes(protocol: types.ModuleType) -> list[type]:
    """Every dataclass of the protocol, in the order of the files."""
    modules = [importlib.import_module(f"{protocol.__name__}.{name}") for name in FILES]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and (value.__module__ == module.__name__ or not issubclass(value, protocol.Struct))
    ]


def protocol_source(protocol: types.ModuleType, menu: Iterable[Any]) -> str:
    lines = [
        "// The messages between kernel and browser, as types and constants.",
        "// Generated from nnx_inspector/screen/protocol by generate_protocol.py: never edit by hand.",
        "",
        f"export const VERSION = {protocol.VERSION};",
    ]
    for name in (
        "QUANTITIES",
        "PARAMETER_QUANTITIES",
        "ROW_STATS",
        "STATISTICS",
        "HISTORY_QUANTILES",
        "UNIT_STATS",
        "POSITION_STATS",
        "CASTS",
        "CAST_STATS",
    ):
        items = ", ".join(
            f'"{v}"' if isinstance(v, str) else repr(v) for v in getattr(protocol, name)
        )
        lines.append(f"export const {name} = [{items}] as const;")
    lines += [
        f"export const {name} = {getattr(protocol, name)};"
        for name in ("SPARK", "HISTORY_BINS", "MOST_UNITS", "OTHER", "CLEAN")
    ]
    lines += [
        "",
        "export type Quantity = (typeof QUANTITIES)[number];",
        "export type Statistic = (typeof STATISTICS)[number];",
    ]
    for cls in message_classes(protocol):
        hints = typing.get_type_hints(cls)
        fields = {f.name: typescript_type(hints[f.name]) for f in dataclasses.fields(cls)}
        doc = " ".join((cls.__doc__ or "").split()).replace("*/", "* /")
        lines += ["", f"/** {doc} */", f"export interface {cls.__name__} {{"]
        if hasattr(cls, "type"):
            lines.append(f'  readonly type: "{cls.type}";')
        lines += [f"  readonly {name}: {script};" for name, script in fields.items()]
        lines.append("}")
    for name, group in (("ToBrowser", protocol.TO_BROWSER), ("ToKernel", protocol.TO_KERNEL)):
        lines += ["", f"export type {name} = {' | '.join(c.__name__ for c in group)};"]
    lines += ["", "/** What a click can add, in the order of the menu. Python can do more. */"]
    lines.append("export const OFFERS: readonly Offer[] = [")
    for offer in menu:
        fields = ", ".join(f"{k}: {json.dumps(v)}" for k, v in dataclasses.asdict(offer).items())
        lines.append(f"  {{ {fields} }},")
    lines.append("];")
    return "\n".join(lines) + "\n"


def golden_messages(protocol: types.ModuleType) -> dict[str, tuple[Any, bytes | None]]:
    """One example of every message, small enough to read, with its buffer.

    The numbers of a buffer count up (`ramp`), so that a test can say what belongs where.
    """
    from nnx_inspector.stats.bins import BINS, UNSEEN_BIN
    from nnx_inspector.stats.encoding import HEAD_BYTES, encode
    from nnx_inspector.stats.summary import Summary

    p = protocol

    def ramp(*shape: int) -> np.ndarray:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 8

    def counts(of: dict[int, int]) -> bytes:
        bins = np.zeros(BINS, np.uint64)
        bins[list(of)] = list(of.values())
        one = Summary(bins=bins, points=np.ones(3), sums=np.ones(3))
        return encode([one]).data[HEAD_BYTES:]

    site = p.Site(
        key="", name="CNN", kind="CNN", parent=-1, depth=0, inputs="float32[8,28,28,1]",
        output="float32[8,10]", parameters=1234, flops=1.5e6, calls=1, stacked=0, aliases=(),
        source="model.py:12", perturbable=True, unseen="", step_ms=12.5, kept_bytes=4096.0,
        of_possible=0.25,
    )  # fmt: skip
    hostile = dataclasses.replace(
        site, key="blocks/<img src=x onerror=alert(1)>", name="<b>0</b>", kind="Dense «ü»", parent=0,
        depth=1, flops=None, calls=2, stacked=12, aliases=("head", "tail"), perturbable=False,
        unseen="inside a while loop", layer=3, note="Only the first 256 of 300 layers",
    )  # fmt: skip
    progress = p.Progress(kind="watch", running=True, step=7, total=100, rate=12.5)
    idle = p.Progress(kind="run", running=False, step=7, total=None, rate=None)
    table = ramp(2, len(p.QUANTITIES), len(p.STATISTICS))
    table[1, 1] = np.nan
    histograms = [counts({8: 3, 1016: 5, UNSEEN_BIN: 8}), counts({3064: 2})]
    sparklines = (np.arange(2 * len(p.QUANTITIES) * p.SPARK) % 256).reshape(2, -1, p.SPARK)
    frame = p.Frame(
        version=p.VERSION, seq=3, layout=1, step=7, perturbed=True,
        metrics={"loss": 0.25, "accuracy": float("nan")},
        histograms=tuple(p.Histogram(site=1, quantity=q, bytes=len(histograms[q])) for q in (0, 1)),
        parameters=(
            p.FrameParameter(
                path="blocks/0/kernel", name="kernel", update_ratio=0.001,
                bytes=tuple(map(len, histograms)),
            ),
            p.FrameParameter(
                path="blocks/0/<b>", name="<b>", update_ratio=None, bytes=(len(histograms[1]), -1)
            ),
        ),
        more=3, progress=progress, number=12, held=True,
    )  # fmt: skip
    of_parameters = ramp(2, len(p.PARAMETER_QUANTITIES), len(p.STATISTICS))
    of_parameters[1, 1] = np.nan
    history = p.History(version=p.VERSION, layout=1, site=1, quantity=0, steps=2)
    curves = p.Curves(
        version=p.VERSION,
        names=("loss", "accuracy"),
        points=(3, 1),
        recorded=(3, 1),
        not_finite=(1, 0),
    )
    state = p.State(
        version=p.VERSION, seq=4, selected="blocks/0",
        perturbations=(
            p.Perturbation(
                id=1, site="blocks/0", sites=("blocks/0",), reach=1, kind="Zero", at="output",
                acts_on="value", expression="nni.Zero()", strength=None, strength_name="", low=0.0,
                high=0.0, units=0, units_off=0, mask="", python='insp.perturb("blocks/0", nni.Zero())',
                enabled=True, pending=False, compiling=False, not_acting="",
            ),
            p.Perturbation(
                id=2, site="**", sites=("", "blocks/0"), reach=2, kind="ScaleGradient", at="input",
                acts_on="gradient", expression="nni.ScaleGradient(0.5, at='input')", strength=0.5,
                strength_name="factor", low=0.0, high=2.0, units=0, units_off=0, mask="", python="",
                enabled=False, pending=True, compiling=True, not_acting="it is not called",
            ),
            p.Perturbation(
                id=3, site="head", sites=("head",), reach=1, kind="Mask", at="output",
                acts_on="value", expression="nni.Mask(mask=bool[10])", strength=None,
                strength_name="", low=0.0, high=0.0, units=10, units_off=2, mask="bf80",
                python='insp.perturb("head", nni.Mask.without([1, 9], units=10))', enabled=True,
                pending=False, compiling=False, not_acting="",
            ),
        ),
        training_perturbed=True, listening="during", compiling=1,
        effect=p.Effect(
            source="example", clean={"loss": 0.25}, perturbed={"loss": None}, output_change=0.125,
            kl=0.5, top1_changed=None, sites=(p.SiteEffect(site="blocks/1", change=1.5),),
            moved={"blocks/0/attn": 1.0, "blocks/1": None},
            alone=(
                p.EffectAlone(perturbation=1, loss_change=-0.5, output_change=0.25, kl=0.125,
                              top1_changed=None),
            ),
        ),
        no_effect="", progress=idle,
        cost=p.Cost(plain_seconds=0.01, inspected_seconds=0.011, compilations=2, bytes_sent=4096,
                    frames_dropped=1, errors=0, tree_seconds=0.5, pass_seconds=3.0),
        notices=(p.Notice(level="warning", text="NaN at step 3", site="blocks/0"),),
        python='insp.selected = "blocks/0"', closed=False,
        waiting=(p.Waiting(what="compiling the measured step", seconds=8.5),),
    )  # fmt: skip
    units = p.UnitStats(
        version=p.VERSION, id=12, site="head", each=8, source="the last step",
        units=10, more=0, why="",
    )  # fmt: skip
    compilations = p.Compilations(
        version=p.VERSION, id=14, site="",
        rows=(
            p.CompilationRow(function="step", defined="train.py:12", called="train.py:40", seconds=1.5,
                             step=7, why="x is f32[7,<b>2</b>], before f32[4,2]"),
            p.CompilationRow(function="<lambda>", defined="train.py:3", called="", seconds=0.25,
                             step=None, why="first call"),
        ), more=2, operations=31, operation_seconds=0.5, inspector=3, inspector_seconds=2.25,
    )  # fmt: skip
    casts = p.Casts(
        version=p.VERSION,
        id=15,
        site="",
        step=7,
        total=3,
        rows=(
            p.CastRow(site="blocks/0", name="activations"),
            p.CastRow(site="", name="<b> gradient"),
        ),
    )
    code = p.Code(
        version=p.VERSION, id=13, site="head", kind="Linear", documentation="A <b>linear</b> layer.",
        excerpts=(p.Excerpt(file="model.py", function="CNN.__call__", first=11, line=12,
                            text="def __call__(self, x):\n    return self.head(x)"),),
        sown=("head/seen",), why="",
    )  # fmt: skip
    both = p.ComparedRow(
        site="conv", quantity="output", where="both", total_variation=0.75, quantile_distance=1.5,
        constant=False, mean_difference=-0.25, std_difference=0.5, rms_difference=None, nan=0, nan_pinned=3,
        shapes="00ff" * p.SPARK,
    )  # fmt: skip
    constant = dataclasses.replace(both, quantity="gradient", quantile_distance=None, constant=True)
    gone = p.ComparedRow(
        site="conv/old", quantity="output", where="pinned", total_variation=None, quantile_distance=None,
        constant=False, mean_difference=None, std_difference=None, rms_difference=None, nan=None, nan_pinned=0,
        shapes="",
    )  # fmt: skip
    weights = (
        p.WeightRow(
            parameter="head/kernel", array="float32[4,3]", where="both", distance=0.5,
            relative_change=0.25, total_variation=0.125, change="00ff" * (p.SPARK // 2),
        ),
        p.WeightRow(
            parameter="old", array="float32[2]", where="pinned", distance=None,
            relative_change=None, total_variation=None, change="",
        ),
    )  # fmt: skip
    compared = p.Compared(
        version=p.VERSION, id=24, number=57, pinned=p.OTHER, rows=(both, constant, gone), total=9,
    )  # fmt: skip
    sweep = p.Sweep(
        version=p.VERSION, running=False, stopped=True, done=2, total=3, sites="**",
        perturbation="nni.Zero()", source="the last step", measures=("loss_change", "output_change"),
        loss=0.25, rows=(
            p.SweepRow(site="head", loss_change=2.0, output_change=1.0, kl=None, top1_changed=None,
                       why_not=""),
            p.SweepRow(site="blocks/0", loss_change=None, output_change=None, kl=None,
                       top1_changed=None, why_not="it returns no array"),
        ), measured=2, error="",
    )  # fmt: skip
    flow = p.Flow(
        version=p.VERSION, layout=1, site="blocks", id=6,
        nodes=(
            p.FlowNode(role="module", site="blocks/0", name="0", kind="<b>Dense</b>", output="float32[8,4]",
                       calls=2, times=24, conditional=True),
            p.FlowNode(role="output", site="blocks", name="output", kind="", output="float32[8,4]", calls=1,
                       times=None, conditional=False),
        ),
        edges=(
            p.FlowEdge(producer=0, consumer=0, shapes=("float32[8,4]",), loop=True),
            p.FlowEdge(producer=0, consumer=1, shapes=(), loop=False),
        ),
        absent=(p.FlowAbsent(site="blocks/1", why="it is not called by the example"),),
    )  # fmt: skip
    change = p.NnxChange(same=False, distance=0.5, relative=0.25, before="2", after="2.5")
    nnx = p.Nnx(
        version=p.VERSION, id=6, site="blocks/0",
        nodes=(
            p.NnxNode(
                path="blocks/0", name="0", type="Block", depth=0, module="blocks/0", reference=0,
                first=None, also=(), attributes=(p.NnxAttribute(name="features", text="8"),),
                attributes_total=1,
            ),
            p.NnxNode(
                path="blocks/0/tied", name="tied", type="Linear", depth=1, module="blocks/0/dense",
                reference=1, first="blocks/0/dense", also=("head",), attributes=(), attributes_total=0,
            ),
        ),
        nodes_total=3,
        variables=(
            p.NnxVariable(
                path="blocks/0/scale", module="blocks/0", type="Param", shape="()", dtype="float32", bytes=4,
                sharding="cpu:0", held="array", committed=False, metadata="", value="2.5",
                reference=2, first=None, also=(), change=change, passed=None,
            ),
        ),
        variables_total=2,
        kinds=(p.NnxKind(type="Param", variables=2, elements=9, bytes=36),),
        modes=(
            p.NnxMode(
                module="blocks/0", type="Dropout", name="deterministic", own="False", in_force="True",
                value=True, flag=True, switched=True, documentation="Whether nothing is dropped.",
            ),
        ),
        modes_total=1, step=7, since=6, passed="step", uncompared="",
    )  # fmt: skip
    return {
        "layout": (p.Layout(version=p.VERSION, layout=1, model="CNN", sites=(site, hostile), attending=("head",), sequences=True), None),
        "frame": (
            frame,
            p.buffer_of(
                table, ramp(2, len(p.ROW_STATS)), of_parameters, sparklines.astype(np.uint8),
                *histograms, *histograms, histograms[1],
            ),
        ),
        "updates": (
            p.Updates(
                version=p.VERSION, layout=1, site=1, parameters=("blocks/0/kernel",), steps=2
            ),
            p.buffer_of(np.array([5.0, 7.0]), ramp(1, 2), 1 - ramp(1, 2)),
        ),
        "choices": (
            p.Choices(
                version=p.VERSION, layout=1, site=1, key="blocks/0@experts", experts=True,
                figures=("load", "router_entropy"), rows=2, steps=3, more=1,
            ),
            p.buffer_of(np.array([5.0, 7.0, 9.0]), ramp(2, 2, 3)),
        ),
        "history": (
            history,
            p.buffer_of(
                np.array([5.0, 7.0]), ramp(2, len(p.HISTORY_QUANTILES)), ramp(p.HISTORY_BINS + 1),
                ramp(2, p.HISTORY_BINS),
            ),
        ),
        "curves": (curves, p.buffer_of(np.array([[1, 0.5], [2, np.nan], [3, 0.25]]), np.array([[3, 1.0]]))),
        "state": (state, None),
        "units": (units, p.buffer_of(ramp(len(p.UNIT_STATS), 10))),
        "code": (code, None),
        "compilations": (compilations, None),
        "casts": (casts, p.buffer_of(ramp(2, len(p.CASTS), len(p.CAST_STATS)))),
        "sweep": (sweep, None),
        "weights": (p.Weights(version=p.VERSION, name="step <b>7</b>", rows=weights, total=9), None),
        "other": (p.Other(version=p.VERSION, name="run <b>7</b>.nni", step=40, number=1), None),
        "compared": (compared, None),
        "findings": (
            p.Findings(
                version=p.VERSION, more=1,
                findings=(p.FindingRow(rule="nonfinite", site="blocks/0", step=3, severity="error",
                                       what="At step 3 <b>it</b> first held NaN", advice="look",
                                       effects=("b is NaN too",), gone=40),),
            ),
            None,
        ),
        "inputs": (
            p.Inputs(
                version=p.VERSION, batch=2, tokens="tokens", positions=2, problem="",
                examples=(p.Example(words=("<b>a</b>", " b"), label="cat", prediction="dog"),
                          p.Example(words=("\n", "ü"), label="", prediction="")),
                pictures=p.Pictures(path="x", count=2, rows=4, columns=2, height=2, width=1,
                                    channels=1, shown="0 … 1", pixels="AP+A/w=="),
            ),
            None,
        ),
        "positions": (
            p.Positions(
                version=p.VERSION, id=14, site="blocks/0", example=1, unit=3, units=8, positions=2,
                axis=None, along=1, axes=("", "position", "feature"),
                figures=("norm", "unit"), source="The example.",
            ),
            p.buffer_of(ramp(2, 2)),
        ),
        "show_positions": (p.ShowPositions(id=14, site="blocks/0", example=1, unit=3, axis=2), None),
        "lens": (
            p.Lens(
                version=p.VERSION, running=False, error="", source="the example, at step 3",
                example=0, unembed="head", norm="norm", words=("a", "<b>"), answers=("x", "y"),
                tokens=(3, 4), gap=0.0, more=2,
                rows=(p.LensRow(site="blocks/0", cells=(
                    p.LensCell(words=("x", " z"), probabilities=(0.5, float("nan")),
                               probability=0.5, rank=1),
                )),),
            ),
            None,
        ),
        "logits": (
            p.Logits(
                version=p.VERSION, running=False, error="", source="the example, at step 3",
                example=0, position=1, token=4, word="y", logit=1.5,
                bars=(p.LogitBar(site="embed", value=2.0), p.LogitBar(site="(biases)", value=-0.5)),
            ),
            None,
        ),
        "attribution": (
            p.Attributed(
                version=p.VERSION, running=False, error="", source="the example, at step 3",
                example=0, of="embed", method="integrated_gradients", word="y", output=1.5,
                difference=1.25, shape=(2,), blocks=1, scores=(1.0, 0.25), words=("a", "<b>"),
            ),
            None,
        ),
        "examples": (
            p.UnitExamples(
                version=p.VERSION, running=False, stopped=True, done=0, total=0, error="",
                source="40 examples of data, at step 3", site="blocks/0", axis=-1, unit=3, units=8,
                count=40, nan=1, constant=False, notes=("1 batch was smaller",), extent=(4,),
                rows=(p.ExciteRow(which="most", rank=1, example=7, place=(1,), value=2.5,
                                  words=("a", "<b>"), at=1),),
            ),
            None,
        ),
        "study": (
            p.Study(
                id=15, what="lens", again=True, site="blocks/0", example=0, position=-1, unit=3,
                axis=-1, token=None, unembed="", norm="norm", method="gradient",
            ),
            None,
        ),
        "stop_study": (p.StopStudy(id=16), None),
        "passes": (
            p.Passes(version=p.VERSION, passes=2, kinds=("run", "watch"), thinned=3),
            p.buffer_of([[4, 7, 0, 0, 0], [5, 8, 1, 1, 2]]),
        ),
        "reply": (p.Reply(id=9, ok=False, error="no site named 'x'"), None),
        "hello": (p.Hello(version=p.VERSION, streams=True, page="k3j9", said=2), None),
        "ack": (p.Ack(seq=3), None),
        "select": (p.Select(id=1, site="blocks/0"), None),
        "choose_example": (p.ChooseExample(id=1, example=3), None),
        "choose_batch": (p.ChooseBatch(id=1, which="step"), None),
        "perturb": (p.Perturb(id=2, site="blocks/0@attention", kind="Scale", strength=0.5, at="input",
                              units=(2,), axis=-3), None),
        "adjust": (p.Adjust(id=3, perturbation=1, enabled=True, strength=None), None),
        "switch_all": (p.SwitchAll(id=5, enabled=False), None),
        "set_every": (p.SetEvery(id=31, every=5), None),
        "measure_next": (p.MeasureNext(id=32), None),
        "read_site": (p.ReadSite(id=33, site="blocks/0", example=2), None),
        "show_pass": (p.ShowPass(id=6, number=12, site="blocks/0"), None),
        "remove": (p.Remove(id=4, perturbation=1), None),
        "nnx": (nnx, None),
        "show_nnx": (p.ShowNnx(id=6, site="blocks/0"), None),
        "switch_mode": (p.SwitchMode(id=7, module="blocks/0", name="deterministic", value=None), None),
        "set_mask": (p.SetMask(id=6, perturbation=None, site="head", units=10, mask="bf80"), None),
        "look": (p.Look(id=7, what="units", site="head"), None),
        "open_beside": (p.OpenBeside(id=8), None),
        "start_sweep": (
            p.StartSweep(id=8, sites="blocks/**", kind="Scale", strength=0.5, at="output"), None
        ),
        "stop_sweep": (p.StopSweep(id=10), None),
        "compare": (p.Compare(id=24, number=57, pinned=p.OTHER), None),
        "arrays": (
            p.Arrays(
                version=p.VERSION, request=6, site="blocks/0", part="output", clean=False,
                parts=("output", "input"), perturbed=True, source="The example.", notes=(),
                arrays=(
                    p.HeldArray(number=1, call=0, name="", shape=(8, 3), dtype="float32",
                                axes=("batch", "feature"), bytes=96),
                ),
            ),
            None,
        ),
        "values": (
            p.Values(
                version=p.VERSION, request=7, array=1, index=(0, 0), axes=(-1, 0, 1), norm_over=-1,
                component="value", exact=False, starts=(0, 0, 0), ends=(1, 8, 3), block=(1, 4, 1),
                counts=(1, 2, 3), planes=("mean", "low", "high"), encoding="float32",
            ),
            b"".join((sign * ramp(1, 2, 3)).astype("<f4").tobytes() for sign in (1, -1, 2)),
        ),
        "show_values": (p.ShowValues(id=6, site="blocks/0", part="gradient", clean=True), None),
        "read_values": (
            p.ReadValues(
                id=7, array=1, index=(0, 0), axes=(-1, 0, 1), starts=(0, 0, 0), ends=(1, 8, 3),
                most=(1, 256, 256), norm_over=-1, component="value", exact=False,
            ),
            None,
        ),
        "flow": (flow, None),
        "layout_library": (p.LayoutLibrary(version=p.VERSION), b"export const arrange = null;\n"),
        "show_operations": (p.ShowOperations(id=6, site="blocks", shown=True), None),
        "show_flow": (p.ShowFlow(id=6, site="blocks"), None),
        "get_layout_library": (p.GetLayoutLibrary(id=7), None),
    }  # fmt: skip


def outputs() -> dict[pathlib.Path, bytes]:
    sys.path.insert(0, str(HERE.parent))
    protocol = importlib.import_module("nnx_inspector.screen.protocol")
    menu = importlib.import_module("nnx_inspector.screen.python_text").offers()
    files = {HERE / "src" / "kernel" / "protocol.ts": protocol_source(protocol, menu).encode()}
    for name, (message, buffer) in golden_messages(protocol).items():
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
            print(
                f"{path.relative_to(HERE.parent)} differs from nnx_inspector/screen/protocol",
                file=sys.stderr,
            )
        return 1 if stale or known else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    for path in known:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `meshes` tries on a model: every public function, some in several ways.

Each function takes a `World`, whose arrays lie on a mesh or on one device, and returns figures. An
error of one of several ways is its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from mesh_models import loss_of

import nnx_inspector as nni
from nnx_inspector.stats.summarize import merge_in_trace, summarize
from nnx_inspector.stats.summary import merge
from nnx_inspector.stats.units import measure_units


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What a function is tried on: a new model, its batch, the labels and how to place a batch."""

    model: Any
    x: Any
    labels: Any
    at: Callable[[Any], Any]
    text: bool
    manual: bool

    def loss(self) -> Callable[..., Any]:
        return functools.partial(loss_of, self.labels)

    @contextlib.contextmanager
    def inspector(self, *args: Any, **options: Any) -> Iterator[Any]:
        args = args or (self.model, self.x)
        insp = nni.Inspector(*args, display=False, **options)
        try:
            yield insp
        finally:
            insp.close()

    def site(self) -> str:
        return "blocks/0" if self.text else "head" if self.manual else "up"

    def inner(self) -> str:
        return "blocks/1/up" if self.text else "head" if self.manual else "down"


@contextlib.contextmanager
def record_error(name: str, found: dict[str, Any]) -> Iterator[None]:
    """One of several things that a function is tried with: an error of it is its result."""
    try:
        yield
    except Exception as error:
        found[name] = error


FUNCTIONS: dict[str, Callable[[World], Any]] = {}


def register(function: Callable[[World], Any]) -> Callable[[World], Any]:
    FUNCTIONS[function.__name__] = function
    return function


@register
def bare(w: World) -> Any:
    return nnx.jit(lambda m, x: m(x))(w.model, w.x), nnx.jit(nnx.value_and_grad(w.loss()))(
        w.model, w.x
    )


@register
def capture(w: World) -> Any:
    return nnx.jit(lambda m, x: nni.capture(m, units=-1)(x))(w.model, w.x)


@register
def capture_of_values(w: World) -> Any:
    y, record = nni.capture(w.model, values=True, only=w.site())(w.x)
    return y, record[w.site()].values


@register
def capture_eagerly(w: World) -> Any:
    return nni.capture(w.model)(w.x)


@register
def value_and_grad(w: World) -> Any:
    (loss, record), grads = nnx.jit(nni.value_and_grad(w.loss(), units=-1))(w.model, w.x)
    return loss, record, grads


@register
def value_and_grad_eagerly(w: World) -> Any:
    return nni.value_and_grad(w.loss(), only=[w.site(), w.inner()], values=True)(w.model, w.x)


@register
def operations(w: World) -> Any:
    only = ["**", f"{w.site()}@*", "**@attention"] if w.text else ["**", "@*"]
    return nnx.jit(nni.value_and_grad(w.loss(), only=only))(w.model, w.x)


@register
def trace(w: World) -> Any:
    return nni.trace(w.model, w.x).to_frame().drop(columns="inputs")  # they name the sharding


@register
def first_nan(w: World) -> Any:
    w.model.head.kernel.set_value(jnp.full_like(w.model.head.kernel[...], 3e38))

    def root(model: Any, x: Any) -> Any:
        return jnp.sqrt((model(x) * 0).sum())

    found = [
        nni.first_nan(w.loss())(w.model, w.x),
        nni.first_nan(w.loss(), gradients=True)(w.model, w.x),
        nni.first_nan(root, gradients=True)(w.model, w.x),
    ]
    return [(one.name, str(one.site), one.makes, one.result) for one in found if one is not None]


@register
def diagnose(w: World) -> Any:
    _, record = nnx.jit(nni.capture(w.model))(w.x)
    with w.inspector() as insp:
        return [(f.rule, f.site) for f in nni.diagnose(insp.recording)], record


PERTURBATIONS: dict[str, Callable[[World], Any]] = {
    "zero": lambda w: nni.Zero(),
    "scale": lambda w: nni.Scale(0.5),
    "mean": lambda w: nni.Mean(),
    "mean of all": lambda w: nni.Mean(axis=(0, -1)),
    "shift": lambda w: nni.Shift(1.0, 0.25),
    "noise": lambda w: nni.Noise(0.5, seed=3),
    "clamp": lambda w: nni.Clamp(-0.5, 0.5),
    "cast": lambda w: nni.Cast(jnp.bfloat16),
    "mask": lambda w: nni.Mask.without([1, 2], units=16),
    "patch": lambda w: nni.Patch(np.linspace(-1, 1, 16, dtype=np.float32)),
    "patch of a batch": lambda w: nni.Patch(
        w.at(np.ones((16, 8, 16) if w.text else (16, 16), np.float32))
    ),
    "apply": lambda w: nni.Apply(lambda v, a: v[::-1] * a, (2.0,)),
    "apply, whole": lambda w: nni.Apply(lambda v: jnp.ones(v.shape, v.dtype)),
    "units": lambda w: nni.Zero().only([1, 3]),
    "example": lambda w: nni.Zero().only(example=2),
    "unit of an example": lambda w: nni.Scale(3.0).only([1], example=5),
    "examples as units": lambda w: nni.Noise(1.0).only([0, 9], axis=0),
    "input": lambda w: nni.Zero(at="input"),
    "stop": lambda w: nni.StopGradient(),
    "reverse": lambda w: nni.ReverseGradient(),
    "clip": lambda w: nni.ClipGradient(1e-3),
    "scale gradient": lambda w: nni.ScaleGradient(0.5),
    "parameter noise": lambda w: nni.ParameterNoise(0.1),
    "prune": lambda w: nni.PruneMask(w.at(np.array(0.5, np.float32))),
    "part of a parameter": lambda w: nni.ParameterNoise(0.1).only([1]),
}


ON_PARAMETERS = ("parameter noise", "prune", "part of a parameter")
ELEMENTWISE = ("zero", "scale", "shift", "clamp", "cast", "input", "stop", "reverse")
"""Within a `shard_map` a module sees a part of its array; what others do depends on which part."""


def perturbations_for(w: World) -> dict[str, Callable[[World], Any]]:
    names = ELEMENTWISE if w.manual else PERTURBATIONS
    return {name: PERTURBATIONS[name] for name in names}


def perturbed_site(w: World) -> str:
    return "blocks/0" if w.text else "up" if w.manual else "down"


@register
def perturb(w: World) -> Any:
    step, found = nnx.jit(nnx.value_and_grad(w.loss())), {}
    for name, make in perturbations_for(w).items():
        if name in ON_PARAMETERS:
            continue
        with record_error(name, found), nni.perturb(perturbed_site(w), make(w)):
            found[name] = step(w.model, w.x)
    return found


@register
def perturbed(w: World) -> Any:
    found: dict[str, Any] = {}
    for name, make in perturbations_for(w).items():
        with record_error(name, found):
            loss = nni.perturbed(w.loss())
            grad = nnx.value_and_grad(lambda m, x, p, loss=loss: loss(p, m, x))
            found[name] = nnx.jit(grad)(w.model, w.x, {perturbed_site(w): make(w)})
    return found


@register
def perturbed_eagerly(w: World) -> Any:
    kinds = [name for name in ("zero", "mean", "units", "noise") if name in perturbations_for(w)]
    run = nni.perturbed(w.model)
    return {n: run({perturbed_site(w): PERTURBATIONS[n](w)}, w.x) for n in kinds}


@register
def perturbed_mapped(w: World) -> Any:
    def one(factor: Any) -> Any:
        return nni.perturbed(w.loss())({perturbed_site(w): nni.Scale(factor)}, w.model, w.x)

    return jax.vmap(one)(jnp.array([0.0, 1.0, 2.0]))


@register
def intercept_methods(w: World) -> Any:
    def halve(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return next_fun(*args, **kwargs) * 0.5

    with nni.intercept_methods(halve, only=perturbed_site(w)):
        return nnx.jit(lambda m, x: m(x))(w.model, w.x)


@register
def sweep(w: World) -> Any:
    found: dict[str, Any] = {}
    ways: dict[str, Any] = {
        "zero": {"perturbation": nni.Zero()},
        "mean": {"perturbation": nni.Mean(), "sites": "head"},
        "one by one": {"chunk": 1, "sites": [w.site(), w.inner()]},
        "units": {"units": -1, "sites": w.inner()},
        "examples": {"units": 0, "sites": w.inner()},
        "logits": {"logits": True, "perturbation": nni.Scale(0.0, at="input")},
    }
    for name, how in ways.items():
        with record_error(name, found):
            found[name] = nni.sweep(w.model, w.loss(), w.x, progress=False, **how)
    return found


@register
def attribute(w: World) -> Any:
    found: dict[str, Any] = {}
    for method in ("gradient", "gradient_times_input", "integrated_gradients"):
        for site in (None, w.inner()):
            for output in (None, 1, "labels", "function"):
                if output in ("labels", "function") and (site or method[-1] == "t"):
                    continue
                out = {"labels": w.labels, "function": lambda y: (y**2).sum()}.get(output, output)
                name = f"{method}, {site}, {output}"
                with record_error(name, found):
                    how: Any = {"method": method, "site": site, "output": out, "steps": 4}
                    a = nni.attribute(w.model, w.x, **how)
                    found[name] = a.values, a.error, a.to_frame()
    return found


@register
def top_examples(w: World) -> Any:
    host = np.asarray(w.x)
    found: dict[str, Any] = {}
    for axis in (-1, 1):
        with record_error(f"axis {axis}", found):
            data = [w.x, w.at(host[::-1].copy()), w.at(host[:8])]
            t = nni.top_examples(w.model, data, w.site(), k=3, axis=axis, progress=False)
            found[f"axis {axis}"] = [t.to_frame(unit=u) for u in (0, 3)], t.notes
    return found


@register
def lens(w: World) -> Any:
    if not w.text:
        return None
    found: dict[str, Any] = {"default": nni.lens(w.model, w.x).to_frame()}
    for name, how in {
        "answer": {"answer": 3},
        "answers": {"answer": w.x},
        "function": {"unembed": lambda h: h[..., :7], "norm": False},
    }.items():
        with record_error(name, found):
            found[name] = nni.lens(w.model, w.x, **how).to_frame()
    return found


@register
def logit_attribution(w: World) -> Any:
    if not w.text:
        return None
    found: dict[str, Any] = {}
    for name, how in {"default": {}, "token": {"token": 3, "minus": 2}}.items():
        with record_error(name, found):
            a = nni.logit_attribution(w.model, w.x, **how)
            found[name] = a.contributions, a.logit, a.to_frame()
    return found


def pair_of(y: Any) -> tuple[Any, Any]:
    return jax.vmap(summarize)(y), summarize(y, batch_rank=1)


@register
def summaries(w: World) -> Any:
    y = jax.jit(lambda x: x * 1)(w.x)
    found: dict[str, Any] = {}
    for name, make in {
        "summary": lambda: summarize(y),
        "rows": lambda: summarize(y, batch_rank=1),
        "jitted": lambda: jax.jit(summarize)(y),
        "merged": lambda: merge([summarize(y), summarize(2 * y)]),
        "units": lambda: measure_units(y),
        "examples": lambda: measure_units(y, axis=0),
        "jitted units": lambda: jax.jit(lambda y: measure_units(y, axis=0))(y),
        "long": lambda: measure_units(jnp.tile(y.astype(jnp.float32), (1, 300))),
        "long, examples": lambda: measure_units(jnp.tile(y.astype(jnp.float32), (1, 300)), axis=0),
        "mapped": lambda: jax.vmap(measure_units)(y),
        "a row": lambda: jax.vmap(summarize)(y).row(3),
        "a row of units": lambda: jax.vmap(measure_units)(y).row(3),
        "a row within": lambda: jax.jit(lambda y: jax.vmap(summarize)(y).row(3))(y),
        "both": lambda: jax.jit(lambda y: merge_in_trace(*pair_of(y)))(y),
    }.items():
        with record_error(name, found):
            found[name] = make()
    return found


@register
def compare_weights(w: World) -> Any:
    other = nnx.clone(w.model)
    other.head.kernel.set_value(other.head.kernel[...] * 2)
    return nni.compare_weights(w.model, other)


def train_step(optimizer: Any, loss: Any) -> Any:
    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    return step


def trained(w: World, iterate: Callable[..., Any], count: int = 3) -> list[float]:
    optimizer = nnx.Optimizer(w.model, optax.sgd(2.0**-6), wrt=nnx.Param)
    step = train_step(optimizer, w.loss())
    return [float(step(w.model, optimizer, batch)) for batch in iterate([w.x] * count)]


@register
def watch(w: World) -> Any:
    with nni.watch(w.model, every=1) as recording:
        losses = trained(w, iter)
    return losses, recording


@register
def inspector_watch(w: World) -> Any:
    with w.inspector() as insp:
        losses = trained(w, lambda batches: insp.watch(batches, every=2))
        return losses, insp.recording, [(f.rule, f.site) for f in insp.findings]


@register
def inspector_watch_perturbed(w: World) -> Any:
    found: dict[str, Any] = {}
    for name in ("mean", "example", "clip", "parameter noise"):
        if name not in perturbations_for(w):
            continue
        one = copy_world(w)
        with record_error(name, found), one.inspector() as insp:
            insp.perturb(perturbed_site(w), PERTURBATIONS[name](w))
            losses = trained(one, lambda batches, insp=insp: insp.watch(batches, every=2))
            found[name] = losses, insp.recording, insp.effect
    return found


@register
def inspector_region(w: World) -> Any:
    with w.inspector() as insp:
        with insp.watch(every=2):
            losses = trained(w, iter, 4)
        return losses, insp.recording


@register
def inspector_ticks(w: World) -> Any:
    with w.inspector() as insp:
        with insp.watch(every=2):

            def ticking(batches: Any) -> Any:
                for batch in batches:
                    insp.tick()
                    yield batch

            losses = trained(w, ticking)
        return losses, insp.recording


@register
def inspector_run(w: World) -> Any:
    found: dict[str, Any] = {}
    with w.inspector() as insp:
        found["run"] = insp.run(w.x)
        found["step"] = insp.step(w.loss(), w.x)
        found["recording"] = insp.recording
        found["findings"] = [(f.rule, f.site) for f in insp.findings]
        found["nan"] = insp.first_nan()
        found["parameters"] = insp.parameters("")
        insp.update(nnx.state(w.model))
        found["again"] = insp.run()
        insp.push(nnx.jit(nni.capture(w.model))(w.x)[1])
        found["pushed"] = insp.recording
    return found


@register
def inspector_values(w: World) -> Any:
    found: dict[str, Any] = {}
    with w.inspector() as insp:
        insp.step(w.loss(), w.x)
        sites = ["", w.site(), w.inner(), f"{w.site()}@add" if w.text else "@tanh"]
        for site in sites:
            for part in ("output", "input", "gradient", "parameter", "attention"):
                if part == "attention" and site != "blocks/0":
                    continue
                if part != "output" and "@" in site:
                    continue
                with record_error(f"{site} {part}", found):
                    found[f"{site} {part}"] = insp.values(site, part=part)
    return found


@register
def inspector_units(w: World) -> Any:
    found: dict[str, Any] = {}
    with w.inspector() as insp:
        for site in ("", w.site(), w.inner()):
            for axis in (-1, 0):
                with record_error(f"{site} {axis}", found):
                    found[f"{site} {axis}"] = insp.units(site, axis=axis)
        with record_error("perturbed", found):
            insp.perturb("head", nni.Mean())
            found["perturbed"] = insp.units("")
    return found


@register
def inspector_words(w: World) -> Any:
    if not w.text:
        return None
    with w.inspector(decode=[chr(97 + i) for i in range(16)]) as insp:
        insp.step(w.loss(), w.x)
        return insp.words("blocks/0", 3, unit=2)


@register
def inspector_sweep(w: World) -> Any:
    found: dict[str, Any] = {}
    with w.inspector() as insp:
        found["run"] = insp.sweep("head", progress=False)
        insp.step(w.loss(), w.x)
        found["step"] = insp.sweep(perturbation=nni.Scale(0.5), progress=False)
        found["units"] = insp.sweep(w.inner(), units=-1, progress=False)
    return found


@register
def inspector_effect(w: World) -> Any:
    found: dict[str, Any] = {}
    for name in ("zero", "mean", "unit of an example", "stop", "part of a parameter"):
        if name not in perturbations_for(w):
            continue
        with record_error(name, found), w.inspector() as insp:
            handle = insp.perturb(perturbed_site(w), PERTURBATIONS[name](w))
            found[name] = insp.step(w.loss(), w.x), insp.effect, insp.recording
            handle.enabled = False
            found[name + " off"] = insp.run()
    return found


@register
def essentials(w: World) -> Any:
    """A little of each, for a quick test."""
    found: dict[str, Any] = {}
    kinds = [name for name in ("mean", "noise", "patch") if name in perturbations_for(w)]
    run = nnx.jit(nni.perturbed(lambda model, x: model(x)))
    for name in kinds:
        with record_error(name, found):
            found[name] = run({perturbed_site(w): PERTURBATIONS[name](w)}, w.model, w.x)
    with w.inspector() as insp:
        found["step"] = insp.step(w.loss(), w.x)
        for axis in (-1, 0):
            with record_error(f"units {axis}", found):
                found[f"units {axis}"] = insp.units(w.site(), axis=axis)
        with record_error("sweep", found):
            found["sweep"] = insp.sweep(perturbation=nni.Zero(), progress=False)
        with record_error("attribute", found):
            found["attribute"] = insp.attribute(output=1).values
        with record_error("examples", found):
            found["examples"] = insp.examples(None, w.site(), 2, k=2, progress=False)
    return found


@register
def inspector_studies(w: World) -> Any:
    found: dict[str, Any] = {}
    with w.inspector() as insp:
        if w.text:
            how: Any = {"unembed": "head"}
            with record_error("lens", found):
                found["lens"] = insp.lens(**how).to_frame()
            with record_error("logits", found):
                found["logits"] = insp.logit_attribution(**how).to_frame()
        with record_error("attribute", found):
            found["attribute"] = insp.attribute(output=1).values
        with record_error("examples", found):
            found["examples"] = insp.examples(None, w.site(), 2, k=2, progress=False)
        with record_error("compare", found):
            _, record = nnx.jit(nni.capture(w.model))(w.x)
            found["compare"] = insp.compare(record)
        with record_error("weights", found):
            found["weights"] = insp.compare(nnx.state(w.model))
    return found


@register
def inspector_files(w: World) -> Any:
    with w.inspector() as insp, tempfile.TemporaryDirectory() as folder:
        insp.step(w.loss(), w.x)
        path = pathlib.Path(folder)
        insp.to_html(path / "run.html")
        insp.show_operations(w.site())
        insp.run()
        insp.figure(w.site())
        insp.save(path / "run.nni")
        loaded, recording = nni.load(path / "run.nni"), insp.recording
        insp.close()
        return loaded, nni.compare(loaded, recording)


@register
def inspector_of_a_function(w: World) -> Any:
    def forward(model: Any, x: Any) -> Any:
        return model(x) * 2

    with w.inspector(nnx.jit(forward), w.model, w.x) as insp:
        return insp.run(), insp.recording, insp.units(w.site())


def copy_world(w: World) -> World:
    copy = nnx.clone(w.model)
    return dataclasses.replace(w, model=copy)

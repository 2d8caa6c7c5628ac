"""`propagation`: its figures are those of NumPy in float64, and its words those of the sources."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.records.propagation.result import FLAT, HEALTHY, TOO_DEEP, verdict

BATCH = jax.random.normal(jax.random.key(1), (32, 64))
NORMAL = nnx.initializers.normal


class Mlp(nnx.Module):
    """Square layers of one width, each followed by the same function."""

    def __init__(self, *, rngs, depth=10, width=64, init=None, f=nnx.relu):
        init = init or nnx.initializers.he_normal()
        self.f = f
        self.layers = nnx.List(
            [
                nnx.Linear(64 if i == 0 else width, width, kernel_init=init, rngs=rngs)
                for i in range(depth)
            ]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = self.f(layer(x))
        return x


def by_hand(model, x, f, slope, rows=slice(None)):
    """The deviations of the layers' outputs and of their gradients, for the default loss."""
    h, outputs = np.asarray(x, np.float64), []
    kernels = [np.asarray(layer.kernel[...], np.float64) for layer in model.layers]
    for layer, kernel in zip(model.layers, kernels, strict=True):
        outputs.append(h @ kernel + np.asarray(layer.bias[...], np.float64))
        h = f(outputs[-1])
    back = np.asarray(
        jax.random.normal(jax.random.split(jax.random.key(0), 1)[0], h.shape), np.float64
    )
    gradients = []
    for output, kernel in reversed(list(zip(outputs, kernels, strict=True))):
        gradients.append(back * slope(output))
        back = gradients[-1] @ kernel.T
    return [x[rows].std() for x in outputs], [x[rows].std() for x in gradients[::-1]]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


FUNCTIONS = {
    "relu": (nnx.relu, lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "tanh": (jnp.tanh, np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (nnx.sigmoid, sigmoid, lambda z: sigmoid(z) * (1 - sigmoid(z))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_figures_are_those_of_numpy(name):
    f, forward, slope = FUNCTIONS[name]
    make = functools.partial(Mlp, depth=4, f=f)
    found = nni.propagation(make, BATCH, seeds=(3, 5))
    assert found.sites == tuple(f"layers/{i}" for i in range(4))
    for s, seed in enumerate((3, 5)):
        out, back = by_hand(make(rngs=nnx.Rngs(seed)), BATCH, forward, slope)
        np.testing.assert_allclose(found.forward[0, s, 0], out, rtol=1e-4)
        np.testing.assert_allclose(found.backward[0, s, 0], back, rtol=1e-4)


def test_only_positions_that_count_are_measured():
    f, forward, slope = FUNCTIONS["relu"]
    make = functools.partial(Mlp, depth=2, f=f)
    found = nni.propagation(make, BATCH, seeds=1, where=lambda x: x[:, 0] > 0)
    rows = np.asarray(BATCH[:, 0]) > 0
    out, back = by_hand(make(rngs=nnx.Rngs(0)), BATCH, forward, slope, rows)
    np.testing.assert_allclose(found.forward[0, 0, 0], out, rtol=1e-4)
    np.testing.assert_allclose(found.backward[0, 0, 0], back, rtol=1e-4)


WORDS = [
    ("he", {"depth": 20}, ("steady", "steady")),
    (
        "glorot tanh",
        {"init": nnx.initializers.glorot_normal(), "f": jnp.tanh},
        ("steady", "steady"),
    ),
    ("too small", {"init": NORMAL(0.02)}, ("vanishes", "vanishes")),
    ("too large", {"init": NORMAL(0.5)}, ("explodes", "explodes")),
    (
        "lecun relu",
        {"depth": 20, "init": nnx.initializers.lecun_normal()},
        ("vanishes", "vanishes"),
    ),
    (
        "deep sigmoid",
        {"f": nnx.sigmoid, "init": nnx.initializers.glorot_normal()},
        (None, "vanishes"),
    ),
    ("saturated tanh", {"f": jnp.tanh, "init": NORMAL(0.4), "depth": 12}, ("steady", "explodes")),
]


@pytest.mark.parametrize(("how", "words"), [x[1:] for x in WORDS], ids=[x[0] for x in WORDS])
def test_each_fault_has_its_word(how, words):
    (row,) = (
        nni.propagation(functools.partial(Mlp, **how), BATCH, seeds=2).growth().to_dict("records")
    )
    for name, word in zip(("forward", "backward"), words, strict=True):
        assert word in (None, row[name]), row
        assert row[f"{name}_per_layer"] == pytest.approx(
            row[f"{name}_factor"] ** (1 / (how.get("depth", 10) - 2))
        )


def test_words_change_at_their_limits():
    for limit, inside, outside in ((HEALTHY, "steady", "grows"), (TOO_DEEP, "grows", "explodes")):
        assert (verdict(limit), verdict(limit * 1.01)) == (inside, outside)
    assert verdict(1 / HEALTHY) == "steady"
    assert verdict(0.99 / HEALTHY) == "falls"
    assert verdict(0.99 / TOO_DEEP) == verdict(0.0) == "vanishes"
    assert verdict(float("nan")) == "unknown"


class Scaled(nnx.Module):
    """Three layers in the standard parametrisation or in muP, for Adam (table 8 of Yang and Hu)."""

    def __init__(self, *, width, rngs, mup):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        init = NORMAL(1 / width) if mup else nnx.initializers.lecun_normal()
        self.head = nnx.Linear(width, 10, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(nnx.relu(self.first(x)))))


def trainer(mup, rate=0.01):
    def train(model):
        def is_wide(path, _):  # in muP the rate of a matrix falls with its fan-in
            name = jax.tree_util.keystr(path)
            wide = "kernel" in name and ("hidden" in name or "head" in name)
            return "wide" if mup and wide else "other"

        width = model.hidden.kernel.shape[0]
        labels = lambda tree: jax.tree_util.tree_map_with_path(is_wide, tree)  # noqa: E731
        tx = optax.multi_transform(
            {"wide": optax.adam(rate * 64 / width), "other": optax.adam(rate)}, labels
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss(model):
                return ((model(x) - x[:, :10]) ** 2).mean()

            optimizer.update(model, nnx.grad(loss)(model))

        return lambda x: step(model, optimizer, x)

    return train


def slopes(mup, **how):
    make = functools.partial(Scaled, mup=mup)
    found = nni.propagation(make, BATCH, seeds=2, train=trainer(mup), **how)
    assert found.steps == tuple(range(how["steps"] + 1))
    return found, found.slopes()


def test_the_coordinate_check_tells_mup_from_the_standard_parametrisation():
    found, of_mup = slopes(mup=True, widths=(64, 256, 1024), steps=4)
    assert of_mup["flat"].all(), of_mup
    _, standard = slopes(mup=False, widths=(64, 1024), steps=1)
    assert standard[standard["step"] == 0]["flat"].all()  # it shows after steps only
    after = standard[standard["step"] == 1].set_index("site")["forward"]
    assert min(after["hidden"], after["head"]) > 3 * FLAT
    # the slope of least squares, by NumPy
    x = np.repeat(np.log([64, 256, 1024]), 2)
    for i, site in enumerate(found.sites):
        slope, _ = np.polyfit(x, np.log(found.forward[:, :, 4, i]).ravel(), 1)
        row = of_mup[(of_mup["step"] == 4) & (of_mup["site"] == site)]
        assert row["forward"].item() == pytest.approx(slope, rel=1e-9)


def test_the_frame_and_the_figure_have_each_figure():
    found = nni.propagation(functools.partial(Mlp, depth=3), BATCH, widths=(32, 64), seeds=2)
    frame = found.frame()
    assert list(frame.columns) == ["width", "seed", "step", "depth", "site", "forward", "backward"]
    assert len(frame) == 2 * 2 * 3
    row = frame[(frame["width"] == 64) & (frame["seed"] == 1) & (frame["depth"] == 2)]
    assert row["forward"].item() == found.forward[1, 1, 0, 2]
    assert row["backward"].item() == found.backward[1, 1, 0, 2]
    lines = {t.name: t for t in found.figure().data if t.xaxis in (None, "x")}
    np.testing.assert_array_equal(lines["width 32"].y, np.median(found.forward[0, :, 0], axis=0))
    assert any("Glorot" in name for name in lines)
    assert any("Schoenholz" in name for name in lines)
    assert "steady" in found._repr_html_()


def test_layers_of_a_scan_are_sites_of_their_own():
    class Scanned(nnx.Module):
        def __init__(self, *, rngs):
            @nnx.split_rngs(splits=6)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return nnx.Linear(64, 64, kernel_init=nnx.initializers.he_normal(), rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return nnx.relu(layer(x))

            return run(x, self.layers)

    found = nni.propagation(Scanned, BATCH, seeds=1)
    assert found.sites == tuple(f"layers[{i}]" for i in range(6))
    h = np.asarray(BATCH, np.float64)
    model = Scanned(rngs=nnx.Rngs(0))
    for i in range(6):
        h = h @ np.asarray(model.layers.kernel[...][i], np.float64)
        assert found.forward[0, 0, 0, i] == pytest.approx(h.std(), rel=1e-4)
        h = np.maximum(h, 0)


def test_a_part_without_a_gradient_is_unknown():
    class Cut(Mlp):
        def __call__(self, x):
            return jax.lax.stop_gradient(super().__call__(x))

    (row,) = (
        nni.propagation(functools.partial(Cut, depth=3), BATCH, seeds=1).growth().to_dict("records")
    )
    assert (row["forward"], row["backward"]) == ("steady", "unknown")


def test_what_is_no_array_is_taken_and_returned_as_it_is():
    class Switched(Mlp):
        def __call__(self, x, trained, name):
            x = super().__call__(x)
            doubled = x if trained is True else 2 * x  # 1 == True, and jit takes them for one
            return {"name": name, "kept": trained, "y": doubled}

    make = functools.partial(Switched, depth=2)
    forward, backward = by_hand(make(rngs=nnx.Rngs(0)), BATCH, *FUNCTIONS["relu"][1:])
    for trained, times in ((True, 1), (1, 2)):
        frame = nni.propagation(make, BATCH, trained, "eval", seeds=1).frame()
        np.testing.assert_allclose(frame.forward, forward, rtol=1e-4)
        np.testing.assert_allclose(frame.backward, times * np.asarray(backward), rtol=1e-4)


def test_bad_input_has_a_clear_error():
    with pytest.raises(TypeError, match=r"make_model\(width=8, rngs=nnx.Rngs\(0\)\)"):
        nni.propagation(lambda rngs: Mlp(rngs=rngs), BATCH, widths=(8, 16))
    with pytest.raises(ValueError, match="train="):
        nni.propagation(Mlp, BATCH, steps=2)
    with pytest.raises(ValueError, match="steps="):
        nni.propagation(Mlp, BATCH, train=lambda model: model)
    with pytest.raises(ValueError, match="seed"):
        nni.propagation(Mlp, BATCH, seeds=0)
    with pytest.raises(TypeError):
        nni.propagation(lambda rngs: 3, BATCH)
    with pytest.raises(ValueError, match="two widths"):
        nni.propagation(functools.partial(Mlp, depth=2), BATCH, seeds=1).slopes()
    deep = iter(range(2, 9))
    with pytest.raises(ValueError, match="different sites"):
        nni.propagation(lambda rngs: Mlp(rngs=rngs, depth=next(deep)), BATCH, seeds=2)


def test_models_are_not_changed():
    class Counting(nnx.Module):
        def __init__(self, *, rngs):
            self.norm, self.head = nnx.BatchNorm(64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)
            made.append(self)

        def __call__(self, x):
            return self.head(self.norm(x))

    made: list[Counting] = []
    nni.propagation(Counting, BATCH, seeds=2)
    assert len(made) == 2
    for model in made:
        np.testing.assert_array_equal(model.norm.mean[...], 0.0)


def test_a_narrow_head_is_no_fault():
    """Gradients behind it are smaller by the root of 10 / 1024, whatever the layers do."""

    class Headed(Mlp):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs, depth=4, width=1024)
            self.head = nnx.Linear(1024, 10, rngs=rngs)

        def __call__(self, x):
            return self.head(super().__call__(x))

    found = nni.propagation(Headed, BATCH, seeds=1)
    (row,) = found.growth().to_dict("records")
    assert (row["forward"], row["backward"]) == ("steady", "steady")
    out, back = found.forward[0, 0, 0], found.backward[0, 0, 0]
    assert row["forward_factor"] == pytest.approx(out[3] / out[0])
    assert row["backward_factor"] == pytest.approx(back[0] / back[3])
    assert back[3] / back[4] < 0.1


@pytest.mark.parametrize(
    ("make_model", "widths", "seeds"),
    [
        (Mlp, (16, 32), (0, 1, 2)),
        (lambda w, rngs: Mlp(width=w, rngs=rngs), (16, 32), (0, 1, 2)),
        (lambda w: Mlp(width=w, rngs=nnx.Rngs(0)), (16, 32), (0,)),
        (lambda: Mlp(rngs=nnx.Rngs(0)), None, (0,)),
    ],
)
def test_a_model_is_made_of_what_its_maker_takes(make_model, widths, seeds):
    found = nni.propagation(make_model, BATCH, widths=widths, only="layers/9")
    assert (found.widths, found.seeds) == (widths or (None,), seeds)
    for number, width in enumerate(widths or (64,)):
        expected = nni.propagation(Mlp, BATCH, widths=[width], seeds=1, only="layers/9")
        np.testing.assert_allclose(found.forward[number, 0], expected.forward[0, 0], rtol=1e-6)

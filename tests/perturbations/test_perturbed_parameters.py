"""The parameters that a key selects, and one layer of a stack, against models changed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.perturbations.activations import Zero
from nnx_inspector.perturbations.parameters import ParameterNoise, PruneMask
from nnx_inspector.perturbations.perturbed import perturbed

X = batch(4, 3)
NONE = PruneMask(0.0)


class Net(nnx.Module):
    """Parameters, statistics, RNG streams and LoRA's own kind of parameter."""

    def __init__(self):
        self.linear = nnx.Linear(3, 4, rngs=rngs())
        self.bn = nnx.BatchNorm(4, use_running_average=True, rngs=rngs())
        self.bn.mean[...], self.bn.var[...] = jnp.arange(4.0), 1.0 + jnp.arange(4.0)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs())
        self.lora = nnx.LoRA(4, 2, 4, rngs=rngs())
        self.lora.lora_b[...] = jnp.ones((2, 4))

    def __call__(self, x):
        return self.lora(self.dropout(self.bn(self.linear(x))))


def changed(model, change):
    """A clone whose Variables have the values of `change(path, variable)`."""
    clone = nnx.clone(model)
    for path, variable in nnx.iter_graph(clone):
        if isinstance(variable, nnx.Variable):
            new = change("/".join(map(str, path)), variable)
            if new is not None:
                variable[...] = new
    return clone


@pytest.mark.parametrize("key", ["", "**", "*", "*/**"])
def test_a_modules_path_means_its_parameters_and_no_statistics_or_rng_counts(key):
    model = Net()
    found = perturbed(model)({key: PruneMask(0.5)}, X)
    half = changed(model, lambda _, v: 0.5 * v[...] if isinstance(v, nnx.Param) else None)
    np.testing.assert_allclose(found, half(X), rtol=1e-6)
    noisy = perturbed(model)({key: ParameterNoise(0.1)}, X)
    assert not np.allclose(noisy, model(X))


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("bn", {"bn/scale", "bn/bias"}),
        ("bn/*", {"bn/scale", "bn/bias"}),
        ("bn/mean", {"bn/mean"}),
        ("**/mean", {"bn/mean"}),
        ("lora", {"lora/lora_a", "lora/lora_b"}),
        ("**/kernel", {"linear/kernel"}),
    ],
)
def test_what_names_a_variable_itself_means_it_whatever_its_type(key, names):
    model = Net()
    found = perturbed(model)({key: PruneMask(0.5)}, X)
    expected = changed(model, lambda path, v: 0.5 * v[...] if path in names else None)
    np.testing.assert_allclose(found, expected(X), rtol=1e-6)
    assert not np.allclose(found, model(X))


def test_a_variable_of_integers_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"ParameterNoise at 'dropout/rngs/count', uint32\[\]: .*"):
        perturbed(Net())({"dropout/rngs/count": ParameterNoise(0.1)}, X)
    with pytest.raises(ValueError, match="'dropout' matches no site"):
        perturbed(Net())({"dropout": ParameterNoise(0.1)}, X)


def test_a_parameter_that_two_modules_share_is_perturbed_once():
    class Head(nnx.Module):
        def __init__(self, kernel):
            self.kernel = kernel

        def __call__(self, x):
            return x @ self.kernel[...]

    kernel = nnx.Param(batch(3, 3, seed=1))
    first, second = Head(kernel), Head(kernel)
    run = perturbed(lambda a, b, x: b(a(x)))
    found = run({"**": PruneMask(0.5)}, first, second, X)
    np.testing.assert_allclose(found, 0.25 * (X @ kernel[...] @ kernel[...]), rtol=1e-5)


def test_every_array_of_a_parameter_that_holds_several_is_perturbed():
    class Pair(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones(3), "b": 2.0 * jnp.ones(3)})

        def __call__(self, x):
            pair = self.pair.get_value()
            return x * pair["a"] + pair["b"]

    found = perturbed(Pair())({"pair": PruneMask(0.5)}, X)
    np.testing.assert_allclose(found, 0.5 * X + 1.0, rtol=1e-6)


# ----------------------------------------------------------------- layers


class Stack(nnx.Module):
    """Three layers along `axis`, which the caller's scan splits."""

    def __init__(self, transform=lambda f: f, axis=0):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=axis)
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.layers, self.transform, self.axis = make(rngs()), transform, axis

    def __call__(self, x):
        @nnx.scan(in_axes=(self.axis, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.tanh(layer(x))

        return self.transform(run)(self.layers, x)


def by_hand(model, x, change):
    for layer in range(3):
        kernel, bias = change(layer, model.layers.kernel[...][layer], model.layers.bias[...][layer])
        x = jnp.tanh(x @ kernel + bias)
    return x


WAYS = {"plain": lambda f: f, "jit": nnx.jit, "remat": nnx.remat}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize(("index", "layer"), [(1, 1), (-1, 2)])
def test_one_layers_parameters_are_chosen(way, index, layer):
    model = Stack(WAYS[way])

    def loss(model, x):
        return (perturbed(model)({f"layers[{index}]": PruneMask(0.5)}, x) ** 2).sum()

    def expected(model, x):
        half = lambda i, k, b: (0.5 * k, 0.5 * b) if i == layer else (k, b)  # noqa: E731
        return (by_hand(model, x, half) ** 2).sum()

    found, wanted = (nnx.value_and_grad(f)(model, X) for f in (loss, expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_mask_of_one_layers_parameter_has_that_layers_shape():
    model, mask = Stack(), np.arange(9).reshape(3, 3) % 2
    found = perturbed(model)({"layers[1]/kernel": PruneMask(mask)}, X)
    expected = by_hand(model, X, lambda i, k, b: (k * mask if i == 1 else k, b))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"at 'layers/kernel\[1\]', float32\[3,3\]: mask= of shape"
    ):
        perturbed(model)({"layers[1]/kernel": PruneMask(np.ones((3, 3, 3)))}, X)


def test_the_noise_of_one_layer_leaves_the_others_and_is_its_own():
    class Reads(Stack):
        def __call__(self, x):
            super().__call__(x)
            return 2.0 * self.layers.kernel[...]

    model = Reads()

    def noise(key):
        found = perturbed(model)({key: ParameterNoise(0.1)}, X)
        return np.asarray(found - 2.0 * model.layers.kernel[...]) / 2.0

    first, second = noise("layers[0]"), noise("layers[1]")
    assert first[0].any()
    assert not first[1:].any()
    assert second[1].any()
    assert not second[[0, 2]].any()
    assert not np.allclose(first[0], second[1])
    np.testing.assert_array_equal(noise("layers[-3]"), first)


def test_a_stack_of_stacks_has_an_index_for_each():
    class Outer(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return nnx.Linear(3, 3, use_bias=False, rngs=rngs)

            self.layers = make(rngs())

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(layer, x):
                return jnp.tanh(layer(x))

            return run(self.layers, x)

    model = Outer()

    def expected(chosen):
        x = X
        for i in range(2):
            for j in range(3):
                factor = 0.5 if (i, j) in chosen else 1.0
                x = jnp.tanh(x @ (factor * model.layers.kernel[...][i, j]))
        return x

    one = perturbed(model)({"layers[1][2]": PruneMask(0.5)}, X)
    np.testing.assert_allclose(one, expected({(1, 2)}), rtol=1e-5)
    row = perturbed(model)({"layers[1]": PruneMask(0.5)}, X)
    np.testing.assert_allclose(row, expected({(1, 0), (1, 1), (1, 2)}), rtol=1e-5)
    with pytest.raises(ValueError, match=r"'layers\[0\]\[0\]\[0\]' chooses one layer.*2 scans"):
        perturbed(model)({"layers[0][0][0]": NONE}, X)


def test_a_layer_that_cannot_be_told_or_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'layers/bias' has 3 layers; there is no layer 3"):
        perturbed(Stack())({"layers[3]/bias": NONE}, X)
    with pytest.raises(ValueError, match=r"which part of 'layers/\w+', .*0 scans.*for each layer"):
        perturbed(Stack(axis=1))({"layers[0]": NONE}, X)
    linear = nnx.Linear(3, 3, rngs=rngs())
    with pytest.raises(ValueError, match=r"'\[0\]' chooses one layer, but"):
        perturbed(linear)({"[0]": NONE}, X)


def test_members_of_an_ensemble_have_an_array_with_an_entry_for_each():
    """The way out that the error names: vmap leaves no trace of its axis."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.Linear(3, 2, use_bias=False, rngs=rngs)

    class Ensemble(nnx.Module):
        def __init__(self):
            self.members = make(rngs())

        def __call__(self, x):
            return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x)

    model = Ensemble()
    with pytest.raises(ValueError, match=r"'members\[0\]' chooses one layer"):
        perturbed(model)({"members[0]": NONE}, X)
    found = perturbed(model)({"members": PruneMask(np.array([0.5, 1.0])[:, None, None])}, X)
    kernel = model.members.kernel[...]
    np.testing.assert_allclose(found, jnp.stack([0.5 * X @ kernel[0], X @ kernel[1]]), rtol=1e-6)


def test_values_and_parameters_are_perturbed_in_one_call_and_the_model_keeps_its_own():
    model = Stack()
    before = jax.tree.map(np.asarray, nnx.state(model))
    found = perturbed(model)({"layers[0]": Zero(), "layers[1]": PruneMask(0.5)}, X)
    x = jnp.zeros_like(X)
    for layer in (1, 2):
        factor = 0.5 if layer == 1 else 1.0
        kernel, bias = model.layers.kernel[...][layer], model.layers.bias[...][layer]
        x = jnp.tanh(x @ (factor * kernel) + factor * bias)
    np.testing.assert_allclose(found, x, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)

"""`perturbed` and every kind of perturbation, against models that have it built in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni

X = batch(4, 3)
DIRECTION = jnp.array([1.0, -1.0, 0.5, 0.0])
UNITS = jnp.array([1.0, 0.0, 0.5, 1.0])


def by_hand(model, x, change):
    return model.down(jnp.tanh(change(model.up(x))))


def stack_by_hand(model, x, change):
    kernel, bias = model.layers.kernel[...], model.layers.bias[...]
    for layer in range(3):
        x = jnp.tanh(change(layer, x @ kernel[layer] + bias[layer]))
    return x


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_cast_rounds_as_the_other_precision_does_under_jit_too(jitted):
    model = models.MLP(rngs())
    call = lambda model, x: nni.perturbed(model)({"up": nni.Cast(jnp.bfloat16)}, x)  # noqa: E731
    found = (nnx.jit(call) if jitted else call)(model, X)
    rounded = np.asarray(model.up(X)).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(found, model.down(jnp.tanh(rounded)), rtol=1e-6)
    assert not np.allclose(rounded, model.up(X), rtol=1e-6)


def test_under_vmap_each_example_is_perturbed_as_its_module_sees_it():
    model = models.MLP(rngs())
    run = lambda model, x: jax.vmap(model, in_axes=1, out_axes=1)(x)  # noqa: E731
    found = nni.perturbed(run)({"up": [nni.Mask(UNITS), nni.Mean(axis=0)]}, model, X.T)
    expected = by_hand(
        model, X, lambda a: jnp.broadcast_to((a * UNITS).mean(1, keepdims=True), a.shape)
    )
    np.testing.assert_allclose(found.T, expected, rtol=1e-5)


def test_a_layer_that_is_not_there_is_refused():
    model, x = models.ScannedLinears(rngs()), batch(2, 4)
    with pytest.raises(ValueError, match=r"'layers' has 3 layers; there is no layer 3"):
        nni.perturbed(model)({"layers[3]": nni.Zero()}, x)
    with pytest.raises(ValueError, match=r"within 1 scans, so \[0\]\[0\] chooses none"):
        nni.perturbed(model)({"layers[0][0]": nni.Zero()}, x)


def test_one_layer_of_a_stack_can_be_chosen_where_devices_share_the_batch():
    model, x = models.ScannedLinears(rngs()), batch(2, 4)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    specs = {"in_specs": (jax.sharding.PartitionSpec(), spec), "out_specs": spec}
    run = nnx.shard_map(lambda model, x: model(x), mesh=mesh, **specs)
    found = nni.perturbed(run)({"layers[1]": nni.Zero()}, model, x)
    expected = stack_by_hand(model, x, lambda layer, a: 0 * a if layer == 1 else a)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_only_decides_whether_a_loop_goes_on_cannot_be_perturbed():
    model, x = nnx.Linear(3, 3, rngs=rngs()), batch(2, 3)

    def run(model, x):
        return jax.lax.while_loop(lambda y: model(y).sum() < -1e9, lambda y: y + 1, x)

    with pytest.raises(ValueError, match="it is called in the condition of a while loop"):
        nni.perturbed(run)({"": nni.Zero()}, model, x)


def test_several_act_in_the_order_in_which_they_are_given():
    model = models.MLP(rngs())
    first = nni.perturbed(model)({"up": [nni.Shift(1.0), nni.Scale(2.0)]}, X)
    second = nni.perturbed(model)({"up": [nni.Scale(2.0), nni.Shift(1.0)]}, X)
    np.testing.assert_allclose(first, by_hand(model, X, lambda a: (a + 1) * 2), rtol=1e-6)
    np.testing.assert_allclose(second, by_hand(model, X, lambda a: a * 2 + 1), rtol=1e-6)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_of_several_keys_the_alphabetically_first_acts_first_jitted_or_not(jitted):
    """A dict that passes through jit comes out sorted."""
    model = models.MLP(rngs())
    call = lambda model, what, x: nni.perturbed(model)(what, x)  # noqa: E731
    call = nnx.jit(call) if jitted else call
    one, other = {"up": nni.Scale(2.0)}, {"u*": nni.Shift(1.0)}
    for what in (one | other, other | one):
        found = call(model, what, X)
        np.testing.assert_allclose(found, by_hand(model, X, lambda a: (a + 1) * 2), rtol=1e-6)


def test_what_a_module_receives_can_be_perturbed():
    model = models.MLP(rngs())
    found = nni.perturbed(model)({"down": [nni.Scale(0.5, at="input"), nni.Shift(1.0)]}, X)
    expected = model.down(0.5 * jnp.tanh(model.up(X))) + 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_noise_is_the_same_with_the_same_seed_and_another_at_another_site():
    model = models.MLP(rngs())
    noisy = lambda **kw: nni.perturbed(model)({"down": nni.Noise(0.1, **kw)}, X) - model(X)  # noqa: E731
    np.testing.assert_array_equal(noisy(seed=1), noisy(seed=1))
    assert not np.allclose(noisy(seed=1), noisy(seed=2))
    at_up = nni.perturbed(model.up)({"": nni.Noise(0.1)}, jnp.zeros((64, 3))) - model.up.bias[...]
    at_down = (
        nni.perturbed(model.down)({"": nni.Noise(0.1)}, jnp.zeros((64, 4))) - model.down.bias[...]
    )
    assert abs(float(jnp.std(at_up)) - 0.1) < 0.03
    assert abs(float(jnp.mean(at_up))) < 0.03
    both = nni.perturbed(model)({"*": nni.Noise(0.1)}, jnp.zeros((64, 3)))
    assert both.shape == (64, 2)
    assert at_down.shape == (64, 2)


# ---------------------------------------------------------------- as data


def test_strengths_are_vmapped_over():
    model, factors = models.MLP(rngs()), jnp.array([0.0, 0.5, 1.0])
    found = jax.vmap(lambda s: nni.perturbed(model)({"up": nni.Scale(s)}, X))(factors)
    for one, factor in zip(found, factors, strict=True):
        expected = by_hand(model, X, lambda a, factor=factor: factor * a)
        np.testing.assert_allclose(one, expected, rtol=1e-5)
    several = jax.vmap(lambda p: nni.perturbed(model)({"up": p}, X))(nni.Scale(factors))
    np.testing.assert_allclose(several, found)


def test_strengths_are_scanned_over_and_learned():
    """Differentiable masking: the smallest mask without a loss keeps the units that matter."""
    model = models.MLP(rngs())
    target = by_hand(model, X, lambda a: a * jnp.array([1.0, 0.0, 1.0, 0.0]))

    def loss(logits):
        y = nni.perturbed(model)({"up": nni.Mask(jax.nn.sigmoid(logits))}, X)
        return ((y - target) ** 2).mean()

    def step(logits, _):
        value, gradient = jax.value_and_grad(loss)(logits)
        return logits - 300.0 * gradient, value

    _, losses = jax.lax.scan(step, jnp.zeros(4), None, length=200)
    assert losses[-1] < 0.05 * losses[0]


def test_another_strength_of_a_jitted_call_traces_nothing():
    model, traces = models.MLP(rngs()), []

    @nnx.jit
    def run(model, perturbations, x):
        traces.append(1)
        return nni.perturbed(model)(perturbations, x)

    for strength in (0.0, 0.3, 2.0):
        found = run(model, {"up": nni.Shift(DIRECTION, jnp.float32(strength))}, X)
        expected = by_hand(model, X, lambda a, s=strength: a + s * DIRECTION)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(traces) == 1


def test_without_a_perturbation_it_is_the_plain_call_and_the_model_changes_as_by_it():
    class Counts(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=rngs())

        def __call__(self, x):
            return self.norm(x)

    plain, model = Counts(), Counts()
    np.testing.assert_array_equal(nni.perturbed(model)({}, X), plain(X))
    np.testing.assert_array_equal(model.norm.mean[...], plain.norm.mean[...])


# -------------------------------------------------------------- gradients


def test_forward_mode_and_hessians_go_through_a_gradient_perturbation():
    model = models.MLP(rngs())
    f = lambda x: (nni.perturbed(model)({"up": nni.ScaleGradient(1.0)}, x) ** 2).sum()  # noqa: E731
    plain = lambda x: (model(x) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jacfwd(f)(X), jax.grad(plain)(X), rtol=1e-5)
    np.testing.assert_allclose(jax.hessian(f)(X), jax.hessian(plain)(X), rtol=1e-4, atol=1e-6)


def test_a_gradient_perturbation_is_of_bfloat16_and_complex_values_too():
    class Rounds(nnx.Module):
        def __call__(self, x):
            return x.astype(jnp.bfloat16)

    g = jax.grad(
        lambda x: nni.perturbed(Rounds())({"": nni.ClipGradient(1.0)}, x).astype(jnp.float32).sum()
    )(X)
    np.testing.assert_allclose(np.linalg.norm(g), 1.0, rtol=1e-2)


# ------------------------------------------------------------- parameters


def test_parameters_are_perturbed_for_the_pass_and_the_model_keeps_its_own():
    class Net(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 4, rngs=rngs())
            self.norm = nnx.BatchNorm(4, rngs=rngs())

        def __call__(self, x):
            return nnx.jit(lambda linear, norm, x: norm(linear(x)))(self.linear, self.norm, x)

    model = Net()
    kernel = np.asarray(model.linear.kernel[...])
    mask = jnp.array(np.arange(12).reshape(3, 4) % 2, jnp.float32)
    expected = Net()
    expected.linear.kernel[...] = expected.linear.kernel[...] * mask
    found = nni.perturbed(model)({"linear/kernel": nni.PruneMask(mask)}, X)
    np.testing.assert_allclose(found, expected(X), rtol=1e-5)
    np.testing.assert_array_equal(model.linear.kernel[...], kernel)
    np.testing.assert_allclose(model.norm.mean[...], expected.norm.mean[...], rtol=1e-5)


def test_noise_on_parameters_is_each_ones_own_and_of_its_strength():
    model = nnx.Linear(64, 64, rngs=rngs())
    noisy = lambda **kw: nni.perturbed(model)({"": nni.ParameterNoise(0.1, **kw)}, jnp.eye(64))  # noqa: E731
    change = noisy() - model(jnp.eye(64))
    assert abs(float(jnp.std(change)) - 0.1 * np.sqrt(2)) < 0.01 * np.sqrt(2) + 0.03
    np.testing.assert_array_equal(noisy(seed=3), noisy(seed=3))
    gradient = jax.grad(
        lambda std: nni.perturbed(model)({"": nni.ParameterNoise(std)}, X @ jnp.ones((3, 64))).sum()
    )(0.1)
    assert np.isfinite(gradient)


# ----------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("perturbations", "error", "text"),
    [
        (
            {"up": nni.Mask(jnp.ones(3))},
            ValueError,
            r"Mask at 'up', float32\[4,4\]: .*shape \(3,\)",
        ),
        ({"up": nni.Shift(jnp.ones(5))}, ValueError, r"offset= of shape \(5,\) does not broadcast"),
        ({"up": nni.Patch(jnp.ones((2, 4)))}, ValueError, r"value= of shape \(2, 4\)"),
        ({"up": nni.Mean(axis=2)}, ValueError, r"no axis 2"),
        ({"up": nni.Apply(jnp.sum)}, ValueError, "must keep shape and dtype"),
        ({"ups": nni.Zero()}, ValueError, "'ups' matches no site of this model.*'up'"),
        ({"ups": nni.ParameterNoise(1.0)}, ValueError, "'ups' matches no.*up/"),
        ({"up": nni.PruneMask(jnp.ones(7))}, ValueError, r"PruneMask at 'up/bias'.*shape \(7,\)"),
        ({"up": nni.Zero}, TypeError, "must be a perturbation.*got Zero"),
        ({"up": 0.5}, TypeError, "must be a perturbation.*got float"),
        ({3: nni.Zero()}, TypeError, "A key must be a site key.*got int"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_runs(perturbations, error, text):
    model = models.MLP(rngs())
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda x: nni.perturbed(model)(perturbations, x), X)


def test_kinds_check_their_numbers():
    for make, error, text in (
        *[
            (lambda bad=bad: nni.Scale(bad), ValueError, "finite float32 number")
            for bad in (float("nan"), float("inf"), 1e300)
        ],
        (lambda: nni.Noise(-1.0), ValueError, "at least 0"),
        (lambda: nni.Scale("x"), TypeError, "takes a number"),
        (lambda: nni.Clamp(), ValueError, "low=, high= or both"),
        (lambda: nni.Cast(jnp.int32), TypeError, "floating-point dtype"),
        (lambda: nni.Zero(at="middle"), ValueError, "'output' or 'input'"),
        (lambda: nni.Apply(3), TypeError, "a function of an array"),
    ):
        with pytest.raises(error, match=text):
            make()


def test_an_integer_output_takes_what_has_a_meaning_for_it():
    class Counts(nnx.Module):
        def __call__(self, x):
            return jnp.round(10 * x).astype(jnp.int32)

    model, y = Counts(), jnp.round(10 * X).astype(jnp.int32)
    np.testing.assert_array_equal(
        nni.perturbed(model)({"": nni.Clamp(-3, 3)}, X), jnp.clip(y, -3, 3)
    )
    np.testing.assert_array_equal(nni.perturbed(model)({"": nni.Zero()}, X), jnp.zeros_like(y))
    with pytest.raises(TypeError, match="Scale needs floating-point values"):
        nni.perturbed(model)({"": nni.Scale(0.5)}, X)


# --------------------------------------------------------- in a region of code


def test_perturb_takes_noise_inputs_and_gradients():
    model = models.MLP(rngs())
    with nni.perturb("down", nni.Noise(0.1, seed=3)):
        found = model(X)
    np.testing.assert_allclose(
        found, nni.perturbed(model)({"down": nni.Noise(0.1, seed=3)}, X), rtol=1e-6
    )
    with nni.perturb("down", nni.Scale(0.5, at="input")):
        found = model(X)
    np.testing.assert_allclose(found, model.down(0.5 * jnp.tanh(model.up(X))), rtol=1e-6)
    for jitted in (False, True):
        loss = lambda x: (model(x) ** 2).sum()  # noqa: E731
        gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
        plain = gradient(X)
        with nni.perturb("up", nni.ReverseGradient(2.0)):
            np.testing.assert_allclose(gradient(X), -2.0 * plain, rtol=1e-6)


@pytest.mark.parametrize("trace", [jax.jit, jax.checkpoint, jax.vmap, jax.grad, nni.capture])
def test_perturb_entered_inside_a_trace_is_part_of_the_program(trace):
    """The program runs after the region and no longer reads its numbers."""
    model, direction = nnx.Linear(3, 3, rngs=rngs()), np.ones(3, np.float32)
    inner = jax.jit(lambda x: model(x))
    plain = inner(X)

    def run(*args):
        with nni.perturb("", nni.Scale(0.5)), nni.perturb("", nni.Shift(direction, 2.0)):
            y = inner(args[-1])
        return y.sum() if trace is jax.grad else y

    def by_hand(x):
        y = 0.5 * (model(x) + 2.0)
        return y.sum() if trace is jax.grad else y

    if trace is nni.capture:
        found, expected = nni.capture(run)(model, X)[0], by_hand(X)
    else:
        found, expected = trace(run)(X), trace(by_hand)(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(inner(X), plain)


def test_perturb_with_other_arrays_traces_nothing_anew():
    model, traces = models.MLP(rngs()), []

    @nnx.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    run(model, X)
    for number in range(3):
        mask = jnp.arange(4) == number
        with nni.perturb("up", nni.Mask(mask)):
            found = run(model, X)
        expected = by_hand(model, X, lambda a, mask=mask: a * mask)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("perturbation", "error", "text"),
    [
        (nni.ParameterNoise(0.1), TypeError, "acts on parameters. Use nni.perturbed"),
        (nni.Mask(jnp.ones(3)), ValueError, r"Mask at 'up', float32\[4,4\]"),
        (nni.Zero, TypeError, r"Pass an instance: nni.Zero\(\)"),
        (0.5, TypeError, "A perturbation must be.*got float"),
    ],
)
def test_perturb_refuses_what_has_no_meaning(perturbation, error, text):
    model = models.MLP(rngs())
    with pytest.raises(error, match=text), nni.perturb("up", perturbation):
        model(X)


def test_perturb_refuses_a_traced_strength_and_names_the_way():
    model = models.MLP(rngs())

    def loss(strength):
        with nni.perturb("up", nni.Scale(strength)):
            return model(X).sum()

    with pytest.raises(nni.InspectorError, match=r"Scale got a traced value.*nni.perturbed"):
        jax.grad(loss)(0.5)


@pytest.mark.parametrize("given", [nni.Zero(), "up", None])
def test_perturbations_are_given_by_site(given):
    model = models.MLP(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"a dict by site, such as \{'blocks/0': nni.Zero\(\)\}"):
        nni.perturbed(model)(given, jnp.ones((2, 4)))

"""Places: the perturbations that a program has room for, switched by data, in every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import nnx_inspector as nni
from nnx_inspector.perturbations.parameters import ParameterNoise, ParameterPerturbation, PruneMask
from nnx_inspector.perturbations.places import CLEAN, Setting, apply_if, data_of, place_of

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 3)), jnp.float32)
UNITS = np.array([1.0, 0.0, 0.5], np.float32)

KINDS = {
    "zero": nni.Zero(),
    "scale": nni.Scale(0.5),
    "shift": nni.Shift(UNITS, 2.0),
    "noise": nni.Noise(0.1, seed=3),
    "clamp": nni.Clamp(-0.1, 0.2),
    "mask": nni.Mask(UNITS),
    "boolean mask": nni.Mask(UNITS > 0),
    "mean": nni.Mean(),
    "patch": nni.Patch(UNITS),
    "cast": nni.Cast(jnp.bfloat16),
    "apply": nni.Apply(jnp.multiply, (UNITS,)),
    "scale gradient": nni.ScaleGradient(0.5),
    "reverse gradient": nni.ReverseGradient(),
    "stop gradient": nni.StopGradient(),
    "clip gradient": nni.ClipGradient(0.1),
    "parameter noise": ParameterNoise(0.1),
    "prune mask": PruneMask(UNITS > 0),
}


def directly(x, one):
    if isinstance(one, ParameterPerturbation):
        return one.apply(x, "a/0/0")
    return one.apply_at(x, "a/0/0")


def apply_place(place, on, leaves, x):
    return apply_if(on, directly, x, jax.tree.unflatten(place.treedef, leaves))


WAYS = {
    "plain": lambda f: lambda x: jax.value_and_grad(lambda x: f(x).sum())(x[0]),
    "jit": lambda f: jax.jit(lambda x: jax.value_and_grad(lambda x: f(x).sum())(x[0])),
    "vmap": lambda f: jax.jit(lambda x: jax.vmap(jax.value_and_grad(lambda x: f(x).sum()))(x)),
    "grad of vmap": lambda f: jax.jit(jax.value_and_grad(lambda x: jax.vmap(f)(x).sum())),
    "scan": lambda f: jax.jit(
        jax.value_and_grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x).sum(), None), 0.0, x)[0])
    ),
    "remat": lambda f: jax.jit(jax.value_and_grad(lambda x: jax.checkpoint(f)(x[0]).sum())),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_a_place_does_what_its_perturbation_does_and_nothing_where_it_is_off(name, way):
    one = KINDS[name]
    place = place_of(one, ["a"])

    def program(on, leaves, x):
        return WAYS[way](lambda x: jnp.sin(apply_place(place, on, leaves, jnp.cos(x))))(x)

    run = program if way == "plain" else jax.jit(program)
    wanted = {
        True: WAYS[way](lambda x: jnp.sin(directly(jnp.cos(x), one)))(X),
        False: WAYS[way](lambda x: jnp.sin(jnp.cos(x)))(X),
    }
    for on in (True, False):
        found = run(*_split(place.data(one, on=on)), X)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted[on]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    if way == "jit":
        assert run._cache_size() == 1  # jax has no public count of its programs


def _split(data):
    return data[0], data[1:]


def test_the_side_that_is_not_taken_leaks_no_nan():
    place = place_of(nni.Apply(jnp.sqrt), ["a"])
    loss = jax.jit(lambda on, x: apply_place(place, on, (), x).sum())
    x = jnp.array([-1.0, 0.0, 4.0])
    assert np.isfinite(loss(np.False_, x))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss, 1))(np.False_, x), [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64]
)
def test_shape_dtype_and_off_are_bitwise(dtype):
    x = (10 * X[0]).astype(dtype)
    for one in KINDS.values():
        if one.why_not(x) is None:
            place = place_of(one, ["a"])
            for on in (True, False):
                data = place.data(one, on=on)
                y = jax.jit(lambda d, x, p=place: apply_place(p, d[0], d[1:], x))(data, x)
                assert (y.shape, y.dtype) == (x.shape, x.dtype)
            np.testing.assert_array_equal(np.asarray(y), np.asarray(x))


def test_on_several_devices_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = PartitionSpec("d")
    for one in (nni.Zero(), nni.Patch(2.0), nni.Scale(0.5), nni.StopGradient()):
        place = place_of(one, ["a"])

        def body(x, on, leaves, place=place):
            return apply_place(place, on, leaves, x)

        sharded = jax.shard_map(
            body, mesh=mesh, in_specs=(spec, PartitionSpec(), PartitionSpec()), out_specs=spec
        )
        data = place.data(one, on=True)
        y = jax.jit(sharded)(X, data[0], data[1:])
        np.testing.assert_allclose(y, one.apply(X))
        jax.jit(jax.grad(lambda x, f=sharded, d=data: f(x, d[0], d[1:]).sum()))(X)


def test_equal_places_are_equal_and_hash_alike():
    same = [place_of(nni.Mask(mask), ["a"]) for mask in (UNITS, 1 - UNITS, jnp.asarray(UNITS))]
    assert len({*same}) == 1
    others = [
        place_of(nni.Mask(UNITS), ["b"]),
        place_of(nni.Mask(UNITS), ["a"], (3,)),
        place_of(nni.Mask(UNITS > 0), ["a"]),
        place_of(nni.Mask(UNITS, axis=0), ["a"]),
        place_of(nni.Mask(UNITS, at="input"), ["a"]),
        place_of(PruneMask(UNITS), ["a"]),
        place_of(nni.Patch(UNITS), ["a"]),
    ]
    assert len({*same, *others}) == 8
    assert [p.at for p in others[-3:]] == ["input", "parameter", "output"]


def test_data_are_what_jax_computes_in():
    data = data_of(nni.Apply(jnp.add, (np.arange(3), 1.5, True, np.float64(2))))
    assert [d.dtype for d in data] == [np.int32, np.float32, np.bool_, np.float32]
    place = place_of(nni.Shift(UNITS, 2), ["a"])
    assert [(d.shape, d.dtype) for d in place.off_data()] == [
        (d.shape, d.dtype) for d in place.data(nni.Shift(UNITS, 2), on=True)
    ]


def test_a_clean_setting_is_the_same_code_with_everything_off():
    one, noise = nni.Mask(UNITS), ParameterNoise(0.1)
    place, parameter = place_of(one, ["a"]), place_of(noise, ["a/kernel"])
    setting = Setting(
        {"b": (1.0, 0.0)},
        (place, parameter),
        (place.data(one, on=True), parameter.data(noise, on=True)),
    )
    assert setting.active
    clean = setting.clean()
    assert not clean.active
    assert clean.places == setting.places
    assert clean.rows == {}
    np.testing.assert_array_equal(clean.data[0][1], UNITS)
    assert not CLEAN.active
    assert Setting({"b": (1.0, 0.0)}).active

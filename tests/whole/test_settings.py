"""Every setting of jax: the package's behaviour with it, compared with that without it.

A setting that changes numbers (64 bits, another generator) also applies while the model is built;
figures are compared for the other settings. Context managers set and restore all of them.
"""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import Compilations
from flax import nnx

import nnx_inspector as nni
from nnx_inspector._compat.configuration import Configuration, internal_config

BATCH = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Net(nnx.Module):
    def __init__(self):
        kernel = jnp.asarray(np.linspace(-0.5, 0.7, 9, dtype=np.float32).reshape(3, 3))
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.first.kernel.set_value(kernel)
        self.last = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.last.kernel.set_value(kernel[:, :2])

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def figures(record):
    found = {}
    for site in record:
        for what in ("output", "gradient"):
            summary = getattr(record[site], what)
            if summary is not None:
                found[site, what] = (summary.size, summary.mean, summary.std, summary.max)
    return found


def captured(model, x):
    """trace, capture with everything kept, value_and_grad: eagerly and in the user's own jit."""
    assert [call.site for call in nni.trace(model, x).calls] == ["", "first", "last"]
    _, record = nni.capture(model, values=True, units=-1, parameters=True)(x)
    eager = figures(record)
    eager["units"] = np.asarray(record["first"].units.mean)
    eager["values"] = np.asarray(record["first"].values)
    eager["parameter"] = record.parameters["first/kernel"].value.std
    (loss, record), grads = nnx.jit(nni.value_and_grad(loss_fn))(model, x)
    kernel = np.asarray(jax.device_get(grads["last"]["kernel"][...]))
    return {**eager, "jitted": figures(record), "loss": float(loss), "gradient": kernel}


def perturbed(model, x):
    """A region, an argument, an interceptor; under the user's own jit."""
    graphdef, state = nnx.split(model)
    jitted = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x).sum())
    found, paths = {}, []
    for kind in (nni.Noise(0.1), nni.Mask(np.array([1, 0, 1], np.float32)), nni.Mean()):
        with nni.perturb("first", kind):
            found[type(kind).__name__] = float(jitted(state, x))
    found["argument"] = float(
        jax.device_get(nni.perturbed(model)({"last": nni.Cast("bfloat16")}, x)).sum()
    )

    def note(next_fun, args, kwargs, context):
        paths.append(context.path)
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(note, only="**"):
        found["intercepted"] = float(jitted(state, x))
    assert paths[:3] == ["", "first", "last"]
    return found


def inspected(model, x, tmp_path):
    """An Inspector's own passes, and their recording."""
    insp = nni.Inspector(model, x, display=False)
    try:
        found = {"loss": float(insp.step(loss_fn, x))}
        handle = insp.perturb("first", nni.Noise(0.1))
        found["perturbed"] = float(insp.step(loss_fn, x))
        handle.remove()
        found["run"] = np.asarray(jax.device_get(insp.run(x)))
        found["values"] = np.asarray(insp.values("first"))
        found["units"] = np.asarray(insp.units("first").mean)
        found["parameters"] = insp.parameters("first")["first/kernel"].std
        frame = insp.sweep(progress=False).set_index("site")
        found["sweep"] = frame.loc[["first", "last"], "output_change"].to_numpy()
        found["rules"] = [finding.rule for finding in insp.findings]
        insp.recording.save(tmp_path / "run.nnxi")
        kept = nni.load(tmp_path / "run.nnxi")
        found["kept"] = (kept.summary("first").mean, kept.summary("last").std)
        assert [finding.rule for finding in nni.diagnose(kept)] == found["rules"]
        found["compared"] = len(nni.compare(insp.recording, kept))
        insp.to_html(tmp_path / "page.html")
        return found
    finally:
        insp.close()


def training_step():
    """A user's own step, jitted anew."""

    @nnx.jit
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    return train


def watched(model, x):
    """The user's own jitted step, in an iterator and in a region."""
    with jax.transfer_guard("allow"):  # the user and jax make the array
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    train = training_step()
    found = {}
    insp = nni.Inspector(model, x, display=False)
    try:
        for step, batch in enumerate(insp.watch([x] * 3, every=2)):
            found[step] = float(train(model, optimizer, batch))
            insp.metrics(loss=found[step])
        found["sites"] = {s: insp.recording.summary(s).mean for s in ("first", "last")}
        found["gradient"] = insp.recording.summary("first", "gradient").norm
        found["rules"] = [finding.rule for finding in insp.findings]
    finally:
        insp.close()
    with nni.watch(model, every=1) as run:
        found["region"] = float(train(model, optimizer, x))
    found["told"] = run.summary("last").mean
    return found


USES = {"captured": captured, "perturbed": perturbed, "inspected": inspected, "watched": watched}


@contextlib.contextmanager
def flag(name, value):
    """A setting without a context manager of its own."""
    before = jax.config.read(name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def transfers_forbidden():
    """All transfers but those to the host: on a GPU each figure that `USES` reads is one, and the
    user's own (see one-call.md); on a CPU jax never forbids them.
    """
    with jax.transfer_guard("disallow"), jax.transfer_guard_device_to_host("allow"):
        yield


@contextlib.contextmanager
def every_check():
    """All settings that forbid something, at once."""
    with (
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        transfers_forbidden(),
        jax.legacy_prng_key("error"),
    ):
        yield


@contextlib.contextmanager
def mesh(kind):
    made = jax.make_mesh((1,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(made):
        yield


ALIKE = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer_guard": transfers_forbidden,
    "no jit": lambda: jax.disable_jit(True),
    "explain": lambda: jax.explain_cache_misses(True),
    "log": lambda: jax.log_compiles(True),
    "device": lambda: jax.default_device(jax.devices()[0]),
    "auto mesh": lambda: mesh("Auto"),
    "explicit mesh": lambda: mesh("Explicit"),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "partitionable": lambda: jax.threefry_partitionable(True),
    "key reuse": lambda: jax.debug_key_reuse(True),
    "legacy keys": lambda: jax.legacy_prng_key("error"),
    "custom keys": lambda: flag("jax_enable_custom_prng", True),
    "tracebacks": lambda: flag("jax_traceback_filtering", "off"),
    "checks": lambda: flag("jax_enable_checks", True),
    "no shardy": lambda: flag("jax_use_shardy_partitioner", False),
    "no linearize": lambda: flag("jax_use_direct_linearize", False),
    "constants": lambda: flag("jax_use_simplified_jaxpr_constants", True),
    "thread guard": lambda: flag("jax_thread_guard", True),
    "no optimisations": lambda: flag("jax_disable_most_optimizations", True),
    "leaks": lambda: jax.checking_leaks(),
}
"""Settings that leave every figure equal up to rounding."""

OTHER = {
    "x64": lambda: jax.enable_x64(True),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "not partitionable": lambda: jax.threefry_partitionable(False),
}
"""Settings that change random numbers."""

_plain = {}


def result(use, tmp_path, setting=contextlib.nullcontext):
    model, x = Net(), jax.device_put(BATCH)
    more = (tmp_path,) if use == "inspected" else ()
    with setting():
        return USES[use](model, x, *more)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        a, b = found[name], expected[name]
        if isinstance(b, dict):
            same(a, b)
        elif isinstance(b, list):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=str(name))


def check(setting, use, tmp_path):
    if use not in _plain:
        _plain[use] = result(use, tmp_path)
    same(result(use, tmp_path, setting), _plain[use])


@pytest.mark.parametrize("use", USES)
def test_nothing_that_jax_may_forbid_is_done_by_us(use, tmp_path):
    check(every_check, use, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("setting", ALIKE)
def test_a_setting_changes_no_figure(setting, use, tmp_path):
    if (setting, use) == ("no jit", "watched"):  # see loops.md
        with pytest.raises(nni.InspectorWarning, match="None of the 2 measured steps"):
            check(ALIKE[setting], use, tmp_path)
        return
    check(ALIKE[setting], use, tmp_path)


# ------------------------------------------------------------- a NaN of the user's


class Log(nnx.Module):
    def __call__(self, x):
        return jnp.log(x)


class Root(nnx.Module):
    def __call__(self, x):
        return jnp.sqrt(x * 0.0)  # 0 forward, and 0 * Inf backward


class Around(nnx.Module):
    """A module around one that makes a NaN."""

    def __init__(self, inner):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.inner = inner

    def __call__(self, x):
        return self.inner(self.first(x)) + 1.0


class Hidden(nnx.Module):
    """A NaN that a mask removes: jax reports it if it runs operation by operation."""

    def __call__(self, x):
        return jnp.where(x > 0, jnp.log(x), 0.0)


def notes(error):
    return " ".join(getattr(error.value, "__notes__", ()))


@pytest.mark.parametrize("inner", [Log, Hidden])
def test_a_nan_forward_is_their_error_with_the_site(inner):
    model, x = Around(inner()), jnp.asarray(BATCH)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as plain:
            model(x)
        with pytest.raises(FloatingPointError) as ours_too:
            nni.capture(model)(x)
    assert str(ours_too.value) == str(plain.value)
    assert "'inner'" in notes(ours_too)


def test_a_nan_backward_is_their_error_with_the_site():
    model, x = Around(Root()), jnp.asarray(BATCH)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as plain:
            nnx.value_and_grad(loss_fn)(model, x)
        with pytest.raises(FloatingPointError) as ours_too:
            nni.value_and_grad(loss_fn)(model, x)
    assert str(ours_too.value) == str(plain.value)
    assert "the gradient of 'first' first held" in notes(ours_too)


def test_a_nan_in_their_jit_is_their_error():
    model, x = Around(Log()), jnp.asarray(BATCH)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log") as error:
        nnx.jit(nni.capture(Around.__call__))(model, x)
    assert "'inner'" in notes(error)


def test_an_inspector_shows_the_pass_that_ends_in_their_error():
    model, good = Around(Log()), jnp.full((4, 3), 1.0)
    model.first.kernel.set_value(jnp.eye(3))
    insp = nni.Inspector(model, good, display=False)
    try:
        with jax.debug_nans(True):
            with pytest.raises(FloatingPointError, match="log") as error:
                insp.run(-good)
            assert "'inner'" in notes(error)
            with pytest.raises(FloatingPointError, match="log") as error:
                insp.step(loss_fn, -good)
            assert "'inner'" in notes(error)
        assert insp.recording.summary("inner").nan == 12
        (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
        assert finding.site == "inner"
        assert insp.run(good).shape == (4, 3)
    finally:
        insp.close()
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        nni.Inspector(model, -good, display=False)
    assert "'inner'" in notes(error)


@pytest.mark.parametrize("inner", [Log, Root])
def test_a_nan_in_a_watched_step_is_their_error_and_a_finding(inner):
    model, x = Around(inner()), jnp.full((4, 3), -1.0)
    model.first.kernel.set_value(jnp.eye(3))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    train = training_step()
    insp = nni.Inspector(model, -x, display=False)
    try:
        with jax.debug_nans(True):
            with pytest.raises(FloatingPointError) as plain:
                train(model, optimizer, x)
            loop = insp.watch([x], every=1)
            batch = next(loop)
            with pytest.raises(FloatingPointError) as error:
                train(model, optimizer, batch)  # the loop stays open: its error is examined
        assert str(error.value) == str(plain.value)
        (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
        assert finding.site == ("inner" if inner is Log else "first")
        loop.close()  # else it stays open, in this thread, until the error is collected
    finally:
        insp.close()


# ------------------------------------------------------------------- threads


def test_what_holds_in_one_thread_is_held_in_another():
    found = []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), mesh("Explicit"):
        inside = Configuration.current()
        axes = jax.sharding.get_abstract_mesh().axis_names

    def look():
        with inside.applied():
            found.append(jnp.zeros(1, float).dtype)
            found.append(jax.config.jax_default_matmul_precision)
            found.append(jax.sharding.get_abstract_mesh().axis_names)
        found.append(jnp.zeros(1, float).dtype)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [jnp.float64, "highest", axes, jnp.float32]
    assert inside != Configuration.current() == Configuration()


@pytest.mark.parametrize("setting", ["x64", "precision"])
def test_what_a_loop_compiles_ahead_has_the_settings_of_the_loop(setting):
    model, x = Net(), jax.device_put(BATCH)
    forward = nnx.jit(lambda model, x: model(x).sum() + jnp.zeros((), float))
    handle, found, after = None, [], 0
    with {**ALIKE, **OTHER}[setting](), Compilations() as compiled:
        insp = nni.Inspector(model, x, display=False)
        try:
            for step, _ in enumerate(insp.watch(iter(lambda: 0, 1), every=1)):
                found.append(forward(model, x))
                if step == 2:
                    handle = insp.perturb("first", nni.Shift(1.0))
                    compiled.threads.clear()
                if handle is not None and not handle.compiling:
                    after += 1
                    if after == 3:
                        break
        finally:
            insp.close()
    assert set(compiled.threads) == {"nnx_inspector.arming"}, "the loop compiled it again"
    assert float(found[-1]) != float(found[0])
    assert found[-1].dtype == (jnp.float64 if setting == "x64" else jnp.float32)


def test_a_background_loop_has_the_settings_of_who_began_it():
    found = []
    insp = nni.Inspector(Net(), jax.device_put(BATCH), display=False)
    try:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            thread = insp.background(
                lambda: found.extend(
                    [jnp.zeros(1, float).dtype, jax.config.jax_default_matmul_precision]
                )
            )
        thread.join()
    finally:
        insp.close()
    assert found == [jnp.float64, "highest"]


def test_our_arithmetic_leaves_the_settings_as_they_were():
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        with internal_config():
            assert np.isnan(float(jnp.log(-1.0)))
            assert (jnp.int32(1) + jnp.float32(1)).dtype == jnp.float32
        with pytest.raises(FloatingPointError):
            jnp.log(-1.0)
        with pytest.raises(ValueError, match="strict"):
            jnp.asarray([1], jnp.int32) + jnp.asarray([1.0], jnp.float32)

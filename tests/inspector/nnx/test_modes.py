"""Modes: what can be switched, where, the current values; the model itself never changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from inside import inside
from models import Stacked
from reused_model import ReusedModel

import nnx_inspector as nni
from nnx_inspector.inspector.nnx.modes import Modes


class Core(nnx.Module):
    """A user's module.

    Attributes:
        causal: whether the future is hidden.
    """

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.phase = "train"
        self.causal = True

    def __call__(self, x):
        return self.linear(x)

    def set_view(self, phase: str | None = None, **kwargs):
        """Switch it.

        Args:
            phase: "train" or "eval".
        """
        if phase is not None:
            self.phase = phase


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.List([nnx.Dropout(0.5, rngs=rngs)]) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.core = Core(rngs)
        self.spectral = nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for (drop,) in self.blocks:
            x = drop(x)
        return self.head(self.spectral(self.core(self.norm(x))))


def quietly(model):
    """The modes of a model, with a list of the views that each change gave."""
    modes, views = Modes(model), []
    modes.on_change = views.append
    return modes, views


@pytest.fixture(scope="module")
def reused():
    one = ReusedModel(Net(nnx.Rngs(0)), X)
    yield one
    one.close()


@pytest.fixture
def model(reused):
    return reused.reset()


@pytest.fixture
def modes(model):
    return quietly(model)[0]


def values(model):
    leaves = jax.tree.leaves(nnx.state(model))
    key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(a) if key(a) else a) for a in leaves]


OWN = {
    "blocks/0/0": {"deterministic": False},
    "blocks/1/0": {"deterministic": False},
    "norm": {"use_running_average": False},
    "core": {"phase": "train", "causal": True},
    "spectral": {"use_running_average": False},
}


def test_the_modes_there_are_and_their_values(modes):
    assert dict(modes) == OWN
    assert list(modes) == list(OWN)
    assert len(modes) == 5
    assert dict(modes.items()) == OWN
    assert list(modes.values()) == list(OWN.values())
    assert "norm" in modes
    assert "head" not in modes


def test_a_module_that_is_not_there_or_has_none_names_the_closest(modes):
    with pytest.raises(KeyError, match=r"No module 'nrom' with modes. The closest are 'norm'"):
        modes["nrom"]
    with pytest.raises(KeyError, match=r"No module '' with modes. No module of this model has any"):
        quietly(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[0][""]


@pytest.mark.parametrize(
    ("only", "switched", "expected"),
    [
        (None, {"deterministic": True}, {"blocks/0/0", "blocks/1/0"}),
        ("blocks/0/0", {"deterministic": True}, {"blocks/0/0"}),
        ("**", {"deterministic": True}, {"blocks/0/0", "blocks/1/0"}),
        (nnx.Dropout, {"deterministic": True}, {"blocks/0/0", "blocks/1/0"}),
        (["blocks/1/*", nnx.BatchNorm], {"deterministic": True}, {"blocks/1/0"}),
        (lambda path, module: "norm" in path, {"use_running_average": True}, {"norm"}),
        (None, {"use_running_average": True}, {"norm", "spectral"}),
        ("core", {"phase": "eval", "causal": False}, {"core"}),
    ],
)
def test_setting_switches_what_is_selected_and_nothing_else(model, modes, only, switched, expected):
    graphdef, before = nnx.graphdef(model), values(model)
    modes.set(only, **switched)
    for key, own in OWN.items():
        now = {n: switched.get(n, v) if key in expected else v for n, v in own.items()}
        assert {n: modes[key][n] for n in own} == now
    assert nnx.graphdef(model) == graphdef
    assert all(np.array_equal(a, b) for a, b in zip(before, values(model), strict=True))
    modes.reset()
    assert dict(modes) == OWN
    assert not modes.switches()


def test_only_may_be_named(modes):
    modes.set(only="norm", use_running_average=True)
    assert modes["norm"]["use_running_average"]


def test_later_wins_and_none_takes_back(modes):
    modes.set(deterministic=True)
    modes.set("blocks/1/0", deterministic=False)
    assert modes["blocks/0/0"]["deterministic"]
    assert not modes["blocks/1/0"]["deterministic"]
    modes.set("blocks/0/0", deterministic=None)
    assert not modes["blocks/0/0"]["deterministic"]
    modes.set(deterministic=True)
    assert modes["blocks/0/0"]["deterministic"]
    assert modes["blocks/1/0"]["deterministic"]
    modes.set(deterministic=None)
    assert not modes.switches()


def test_many_switches_leave_few_rules(modes):
    for i in range(20):
        modes.set("norm", use_running_average=i % 2 == 0)
        modes.set(deterministic=i % 2 == 0)
    assert len(modes._rules) == 2  # only its size shows that rules are kept


@pytest.mark.parametrize("name", ["train", "eval"])
def test_train_and_eval_are_those_of_the_module(model, modes, name):
    model.set_attributes(nnx.Dropout, deterministic=None)
    getattr(modes, name)(causal=False)
    theirs = nnx.clone(model)
    getattr(theirs, name)()
    theirs.core.causal = False
    assert nnx.graphdef(modes.view()) == nnx.graphdef(theirs)


def test_train_and_eval_of_a_part(modes):
    modes.eval("blocks/*/*")
    assert modes["blocks/0/0"]["deterministic"]
    assert not modes["norm"]["use_running_average"]
    modes.train(nnx.Linear)
    assert modes["blocks/0/0"]["deterministic"], "no Linear has such a mode: nothing changes"


def test_what_is_not_switched_follows_the_model(model, modes):
    modes.set(nnx.Dropout, deterministic=False)
    model.eval()
    assert modes["norm"]["use_running_average"]
    assert not modes["blocks/0/0"]["deterministic"]
    model.blocks.append(nnx.List([nnx.Dropout(0.1, deterministic=True, rngs=nnx.Rngs(0))]))
    assert not modes["blocks/2/0"]["deterministic"], "a module added later is selected too"
    del model.blocks[0]
    assert modes.switches().in_words() == "deterministic=False on 2 modules"


def test_what_is_in_force_is_read_from_the_copy_not_assumed():
    class Parent(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def set_view(self, phase: str | None = None):
            if phase is not None:
                self.drop.deterministic = phase == "eval"

    modes, _ = quietly(Parent(nnx.Rngs(0)))
    modes.set(phase="eval")
    assert dict(modes) == {"": {"phase": "eval"}, "drop": {"deterministic": True}}
    modes.set("drop", deterministic=False)
    assert modes["drop"]["deterministic"], "the parent's set_view runs last, as in nnx.view"


def test_shared_stacked_and_nested_modules():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    class Whole(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Dropout(0.5, rngs=rngs)
            self.second = self.first
            self.stacked = nnx.split_rngs(splits=3)(nnx.vmap(Layer, in_axes=(0,)))(rngs)
            self.linen = nnx.bridge.ToNNX(linen.Dense(2), rngs=rngs)

    modes, _ = quietly(Whole(nnx.Rngs(0)))
    modes.set(deterministic=True)
    on = {"deterministic": True}
    assert dict(modes) == {"first": on, "stacked/drop": on}


@pytest.mark.parametrize(
    ("only", "switched", "error", "text"),
    [
        (None, {}, ValueError, "takes a mode and its value"),
        (None, {"determinstic": True}, ValueError, "The closest is 'deterministic'"),
        (nnx.BatchNorm, {"deterministic": True}, ValueError, r"'blocks/0/0' \(Dropout\) has, but"),
        (nnx.Linear, {"fast": True}, ValueError, "They have none: no set_view method"),
        (None, {"zeta": 1}, ValueError, r"'core' \(Core\) takes any name: select it with only="),
        ("nrom", {"deterministic": True}, ValueError, "'nrom' matches no site.*'norm'"),
        (3, {"deterministic": True}, TypeError, "only= takes a glob"),
        (None, {"deterministic": "yes"}, TypeError, "True or False .* got 'yes'"),
        (None, {"use_running_average": 1}, TypeError, "True or False"),
        ("core", {"phase": ["eval"]}, TypeError, r"phase is \['eval'\], which is not hashable"),
    ],
)
def test_what_cannot_be_switched_is_refused_and_nothing_changes(modes, only, switched, error, text):
    modes.set(nnx.BatchNorm, use_running_average=True)
    before = dict(modes)
    with pytest.raises(error, match=text):
        modes.set(only, **switched)
    assert dict(modes) == before


def test_a_set_view_with_kwargs_takes_any_name_when_it_is_selected(modes):
    modes.set("core", zeta=1)
    assert modes["core"]["zeta"] == 1
    assert "its set_view takes any name as **kwargs" in repr(modes)
    assert modes.switches().in_words() == "zeta=1 on 'core'"


def test_a_set_view_that_raises_changes_nothing():
    class Refuses(nnx.Module):
        def set_view(self, size: int | None = None):
            if size is not None and size > 2:
                raise ValueError("no such size")

    modes, views = quietly(nnx.Sequential(Refuses()))
    modes.set(size=1)
    with pytest.raises(ValueError, match="no such size") as caught:
        modes.set(size=3)
    assert "'layers/0' (Refuses)" in caught.value.__notes__[0]
    assert modes["layers/0"] == {"size": 1}
    assert len(views) == 1


def test_an_interrupt_while_a_change_is_shown_undoes_it(model):
    def interrupted(view):
        raise KeyboardInterrupt

    modes = Modes(model)
    modes.on_change = interrupted
    with pytest.raises(KeyboardInterrupt):
        modes.eval()
    assert not modes.switches()


def test_the_table_says_what_is_the_models_own_and_what_is_in_force(modes):
    modes.set("norm", use_running_average=True)
    lines = repr(modes).splitlines()
    assert lines[0].split() == ["site", "type", "mode", "own", "in", "force", "documentation"]
    (line,) = [line for line in lines if line.startswith("norm")]
    assert line.split()[:6] == ["norm", "BatchNorm", "use_running_average", "False", "True", "*"]
    assert "if True, the stored batch statistics will be used" in line
    assert sum("*" in line for line in lines) == 1
    assert '"train" or "eval".' in repr(modes)
    assert repr(quietly(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[0]) == (
        "No module of this Linear has modes."
    )


def test_a_long_table_is_cut_and_says_so():
    drops = [nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(70)]
    modes, _ = quietly(nnx.Sequential(*drops))
    lines = repr(modes).splitlines()
    assert len(lines) == 62
    assert lines[-1] == "... and 10 more: see to_frame()."


def test_the_frame_has_a_row_for_each_mode(modes):
    modes.set(nnx.BatchNorm, use_running_average=True)
    frame = modes.to_frame()
    assert list(frame.columns) == [
        "site", "type", "mode", "own", "in_force", "accepts", "documentation"
    ]  # fmt: skip
    assert len(frame) == 6
    row = frame.set_index("site").loc["norm"]
    assert (row["own"], row["in_force"], row["accepts"]) == (False, True, "bool | None")
    empty = quietly(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[0].to_frame()
    assert list(empty.columns) == list(frame.columns)
    assert len(empty) == 0


def test_a_stacked_model_without_modes():
    modes, _ = quietly(Stacked(nnx.Rngs(0)))
    assert [m.mode for m in modes.table()] == ["remat"]


# --------------------------------------------------------- in an inspector


X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


@pytest.fixture
def insp(inspect, model):
    inspector = inspect(model, X)
    inside(inspector).rerun.wait_for_first()
    return inspector


def expected(model, **modes):
    """The result of a copy with these attributes, in a separate program."""
    copy = nnx.clone(model)
    copy.set_attributes(**modes)
    return np.asarray(nnx.jit(lambda m, x: m(x))(copy, X))


def check_run(insp, wanted):
    np.testing.assert_allclose(insp.run(X), wanted, rtol=1e-6, atol=1e-7)


def test_passes_run_in_the_modes_and_the_model_gives_what_it_gave(insp, model):
    graphdef, before = nnx.graphdef(model), values(model)
    own = expected(model)
    insp.modes.set(deterministic=True)
    check_run(insp, expected(model, deterministic=True))
    insp.modes.eval()
    evaluated = expected(model, deterministic=True, use_running_average=True)
    check_run(insp, evaluated)
    view = nnx.view(nnx.clone(model), deterministic=True, use_running_average=True)
    view.set_attributes(nnx.SpectralNorm, use_running_average=True)
    np.testing.assert_allclose(view(X), evaluated, rtol=1e-5, atol=1e-6)
    insp.modes.reset()
    check_run(insp, own)
    assert nnx.graphdef(model) == graphdef
    assert all(np.array_equal(a, b) for a, b in zip(before, values(model), strict=True))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, X), own)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def test_steps_gradients_and_the_clean_pass_of_an_effect_are_those_of_the_modes(insp, model):
    insp.modes.eval()
    loss = insp.step(loss_fn, X)
    copy = nnx.clone(model)
    copy.eval()
    (wanted, record), _ = nni.value_and_grad(loss_fn)(copy, X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(
        insp.recording.summary("norm", "gradient").norm, record["norm"].gradient.norm, rtol=1e-5
    )
    with insp.perturb("head", nni.Scale(0.5)):
        assert insp.effect.output_change == pytest.approx(0.5, rel=1e-5)
        insp.step(loss_fn, X)
        assert insp.effect.clean["loss"] == pytest.approx(float(wanted), rel=1e-5)
        assert insp.effect.perturbed["loss"] == pytest.approx(float(wanted) / 4, rel=1e-5)


def test_switching_there_and_back_compiles_nothing_more(insp):
    insp.modes.eval()
    insp.modes.reset()
    compiled = inside(insp).core.meter.compilations.count
    for _ in range(3):
        insp.modes.eval()
        insp.run(X)
        insp.modes.reset()
        insp.run(X)
    assert inside(insp).core.meter.compilations.count == compiled


def test_the_next_run_follows_the_model_unless_a_mode_is_set(insp, model):
    evaluated = expected(model, deterministic=True, use_running_average=True)
    model.eval()
    check_run(insp, evaluated)
    insp.modes.train()
    model.train()
    trained = expected(model)
    model.eval()
    check_run(insp, trained)
    model.train()
    check_run(insp, trained)


class Branching(nnx.Module):
    def __init__(self, rngs):
        self.short = nnx.Linear(4, 2, rngs=rngs)
        self.long = nnx.Linear(4, 3, rngs=rngs)
        self.deep = False

    def __call__(self, x):
        return self.long(x) if self.deep else self.short(x)


def test_the_trace_and_the_rows_are_those_of_the_modes(inspect):
    model = Branching(nnx.Rngs(0))
    insp = inspect(model, X)
    layout = inside(insp).view.layout
    assert {s.key for s in layout.sites if s.unseen} == {"long"}
    insp.modes.set(deep=True)
    assert [c.site for c in insp.trace.calls] == ["", "long"]
    assert insp.recording.summary("long").size == 18
    layout = inside(insp).view.layout
    assert {s.key: s.output for s in layout.sites} == {
        "": "float32[6,3]", "long": "float32[6,3]", "short": ""
    }  # fmt: skip
    assert [site.module for site in insp.trace.modules] == [model, model.short, model.long]
    with insp.perturb("long", nni.Zero()):
        np.testing.assert_array_equal(insp.run(X), np.zeros((6, 3)))
    insp.modes.reset()
    assert [c.site for c in insp.trace.calls] == ["", "short"]
    assert insp.run(X).shape == (6, 2)


def test_the_screen_says_which_modes_are_in_force(insp):
    def said():
        return [n.text for n in inside(insp).state.notices]

    insp.modes.set(nnx.Dropout, deterministic=True)
    assert said()[0].startswith("Modes for inspected passes: deterministic=True on 2 modules.")
    for i in range(30):
        inside(insp).core.notice("info", f"another {i}")
    assert "deterministic=True on 2 modules" in said()[0], "it stands for as long as it holds"
    insp.modes.reset()
    assert not any("Modes" in text for text in said())


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, 4, rngs=rngs, decode=False)

    def __call__(self, x):
        return self.attention(x)


def test_decoding_without_a_cache_is_shown_then_raised_readably_and_taken_back(inspect):
    model = Decoder(nnx.Rngs(0))
    x = jnp.ones((2, 3, 4))
    insp = inspect(model, x)
    y, recorded, tree = insp.run(x), len(insp.recording), insp.trace
    insp.modes.set(decode=True)
    (text,) = inside(insp).notices
    assert "cannot be run in these modes: ValueError: Autoregressive cache" in text
    assert insp.trace is tree
    with pytest.raises(ValueError, match="call ``init_cache`` first") as caught:
        insp.run(x)
    assert "with the modes decode=True on 'attention'" in " ".join(caught.value.__notes__)
    assert len(insp.recording) == recorded
    insp.modes.reset()
    np.testing.assert_array_equal(insp.run(x), y)
    model.attention.init_cache(x.shape)
    insp.modes.set(decode=True)
    one = x[:, :1]
    copy = nnx.clone(model)
    copy.set_attributes(decode=True)
    np.testing.assert_allclose(insp.run(one), copy(one), rtol=1e-5)
    assert model.attention.cache_index[...] == 0


class Caching(nnx.Module):
    """A mode whose switch creates a Variable."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        return y + self.cache[...] if hasattr(self, "cache") else y

    def set_view(self, cached: float | None = None):
        if cached is not None:
            self.cache = nnx.Cache(jnp.full((4,), cached))


def test_a_switch_may_change_the_structure(inspect):
    model = Caching(nnx.Rngs(0))
    insp = inspect(model, X)
    plain = insp.run(X)
    insp.modes.set(cached=1.0)
    np.testing.assert_allclose(insp.run(X), plain + 1.0, rtol=1e-6)
    insp.modes.set(cached=2.0)
    np.testing.assert_allclose(insp.run(X), plain + 2.0, rtol=1e-6)
    assert insp.modes[""] == {"cached": 2.0}
    assert not hasattr(model, "cache")
    insp.modes.reset()
    np.testing.assert_array_equal(insp.run(X), plain)


def test_a_view_of_a_model_is_inspected_and_shares_its_variables(inspect, model):
    view = nnx.view(model, deterministic=True, use_running_average=True)
    insp = inspect(view, X)
    assert insp.modes["norm"]["use_running_average"]
    np.testing.assert_allclose(insp.run(X), nnx.clone(view)(X), rtol=1e-5, atol=1e-6)
    model.head.bias[...] = jnp.ones(2)
    np.testing.assert_allclose(insp.run(X), nnx.clone(view)(X), rtol=1e-5, atol=1e-6)
    insp.modes.train()
    assert view.norm.use_running_average
    assert not model.norm.use_running_average


class Deep(nnx.Module):
    """Stacked, shared and Linen modules in one model."""

    def __init__(self, rngs):
        class Layer(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(4, 4, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)

            def __call__(self, x):
                return self.drop(self.linear(x))

        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer, in_axes=(0,)))(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.drop
        self.linen = nnx.bridge.ToNNX(linen.Dense(4), rngs=rngs)

    def __call__(self, x):
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )
        return self.linen(self.again(self.drop(x)))


def test_stacked_shared_and_linen_modules_run_in_their_modes(inspect):
    model = nnx.bridge.lazy_init(Deep(nnx.Rngs(0)), X)
    insp = inspect(model, X)
    assert list(insp.modes) == ["layers/drop", "again"]
    for modes in ({"again": True}, {"layers/drop": True, "again": True}):
        insp.modes.reset()
        copy = nnx.clone(model)
        for key, value in modes.items():
            insp.modes.set(key, deterministic=value)
            part = copy.layers.drop if "/" in key else copy.drop
            part.deterministic = value
        np.testing.assert_allclose(
            insp.run(X), nnx.jit(lambda m, x: m(x))(copy, X), rtol=1e-5, atol=1e-6
        )


def test_a_closed_inspector_switches_nothing(insp):
    insp.close()
    with pytest.raises(nni.InspectorError, match="was closed"):
        insp.modes.eval()
    assert not insp.modes.switches()

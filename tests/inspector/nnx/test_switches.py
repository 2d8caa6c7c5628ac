"""What counts as a mode and its documentation; switching as nnx.view and set_attributes do."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from nnx_inspector.inspector.nnx.switches import (
    ModeCatalog,
    Switches,
    abstract_view,
    documented_names,
)


class Viewed(nnx.Module):
    """A module with modes of its own.

    Args:
        temperature: divides the logits.
        mode: said twice, less exactly.
    """

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.mode = "full"
        self.temperature = 1.0

    def __call__(self, x):
        y = self.linear(x) if self.mode == "full" else x
        return y / self.temperature

    def set_view(
        self,
        mode: str | None = None,
        temperature: typing.Optional[float] = None,  # noqa: UP045
    ):
        """Switch it.

        Args:
          mode (str): which path is taken:
            "full" or "skip".

          nothing in particular
        Returns:
          mode: not documentation of an argument.
        """
        if mode is not None:
            self.mode = mode
        if temperature is not None:
            self.temperature = temperature


class Open(nnx.Module):
    """Accepts every mode that nnx.view gets."""

    def __init__(self):
        self.got = nnx.static({})
        self.deterministic = False

    def __call__(self, x):
        return x

    def set_view(self, level: int | None = None, **kwargs):
        self.got = nnx.static({**self.got, "level": level, **kwargs})


class Plain(nnx.Module):
    """Flags without set_view.

    Attributes:
        deterministic: nothing is drawn.
    """

    training = True

    def __init__(self, rngs):
        self.deterministic = False
        self.return_all: bool = False
        self.decode = None
        self.name = "plain"
        self.use_running_average = nnx.Variable(jnp.array(True))
        self._private = True

    def __call__(self, x):
        return x

    @property
    def frozen(self) -> bool:
        return True


class Held(nnx.Module):
    """A flag that is a property with a setter; a method with the name of a flag."""

    def __init__(self, rngs):
        self.inner = nnx.Dropout(0.5, rngs=rngs)

    @property
    def deterministic(self):
        return self.inner.deterministic

    @deterministic.setter
    def deterministic(self, value):
        self.inner.deterministic = value

    def decode(self, x):
        return x


class Wider(nnx.Linear):
    """A subclass of a built-in layer: the settings of Linear are not modes."""

    scaled = False


def rngs():
    return nnx.Rngs(0)


def modes_of(module):
    return list(ModeCatalog().modes_of(module))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nnx.Linear(2, 2, rngs=rngs()), []),
        (lambda: nnx.Dropout(0.5, rngs=rngs()), ["deterministic"]),
        (lambda: nnx.BatchNorm(2, rngs=rngs()), ["use_running_average"]),
        (
            lambda: nnx.SpectralNorm(nnx.Linear(2, 2, rngs=rngs()), rngs=rngs()),
            ["use_running_average"],
        ),
        (
            lambda: nnx.MultiHeadAttention(2, 4, 4, rngs=rngs()),
            ["deterministic", "decode", "batch_size", "max_length"],
        ),
        (lambda: nnx.LoRA(2, 1, 2, rngs=rngs()), []),
        (lambda: nnx.RNN(nnx.LSTMCell(2, 2, rngs=rngs())), []),
        (lambda: nnx.List([]), []),
        (lambda: nnx.bridge.ToNNX(linen.Dropout(0.5, deterministic=True), rngs=rngs()), []),
        (lambda: Viewed(rngs()), ["mode", "temperature"]),
        (lambda: Open(), ["level", "deterministic"]),
        (lambda: Plain(rngs()), ["deterministic", "decode", "training", "return_all"]),
        (lambda: Held(rngs()), ["deterministic"]),
        (lambda: Wider(2, 2, rngs=rngs()), ["scaled"]),
    ],
)
def test_the_modes_of_a_module(make, expected):
    assert modes_of(make()) == expected


def test_what_nnx_view_info_lists_is_listed_with_its_documentation():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 4, 4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    model, catalog = Net(rngs()), ModeCatalog()
    info = nnx.view_info(model)
    for module in (model.attention, model.drop, model.norm):
        for offer in catalog.modes_of(module).values():
            assert f"{offer.name}: {offer.accepts} = None" in info
            assert offer.documentation
            assert offer.documentation in " ".join(info.split())


def test_documentation_comes_from_set_view_then_from_the_class():
    offers = ModeCatalog().modes_of(Viewed(rngs()))
    assert offers["mode"].documentation == 'which path is taken: "full" or "skip".'
    assert offers["mode"].accepts == "str | None"
    assert offers["temperature"].documentation == "divides the logits."
    assert not offers["temperature"].is_flag
    plain = ModeCatalog().modes_of(Plain(rngs()))
    assert plain["deterministic"].documentation == "nothing is drawn."
    assert plain["decode"].documentation == ""
    assert plain["decode"].is_flag


def test_an_undocumented_set_view_is_listed_where_view_info_raises():
    class Undocumented(nnx.Module):
        def set_view(self, fast: bool | None = None):
            """Args:
            other: nothing
            """

    with pytest.raises(KeyError):
        nnx.view_info(Undocumented())
    offer = ModeCatalog().modes_of(Undocumented())["fast"]
    assert (offer.documentation, offer.is_flag) == ("", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("Args:", {}),
        ("No section: at all.", {}),
        (
            "Args:\n  a: one\n\n  b (int, optional): two\n    more: of it\n",
            {"a": "one", "b": "two more: of it"},
        ),
        (
            "Args:\n    a:\n        below\nAttributes:\n    c: three\nNotes:\n    d: no",
            {"a": "below", "c": "three"},
        ),
        ("Parameters:\n  **kwargs: rest\n  - a: list item", {"kwargs": "rest"}),
    ],
)  # fmt: skip
def test_google_docstrings_are_read(text, expected):
    assert documented_names(text) == expected


# ----------------------------------------------------------------- switching


def switched(model, sites):
    """A copy of the model with the modes of some of its sites switched."""
    copy = nnx.clone(model)
    Switches(tuple((path, tuple(modes.items())) for path, modes in sites.items())).apply(copy)
    return copy


def test_switching_is_what_nnx_view_does():
    model = nnx.Sequential(Viewed(rngs()), nnx.Dropout(0.5, rngs=rngs()))
    ours = switched(
        model,
        {
            ("layers", 0): {"mode": "skip", "temperature": 2.0},
            ("layers", 1): {"deterministic": True},
        },
    )
    theirs = nnx.view(model, mode="skip", temperature=2.0, deterministic=True)
    assert nnx.graphdef(ours) == nnx.graphdef(theirs)
    assert nnx.graphdef(ours) != nnx.graphdef(model)


def test_switching_a_flag_is_what_set_attributes_does():
    model = nnx.Sequential(Plain(rngs()), Held(rngs()))
    flags = {"deterministic": True, "training": False}
    ours = switched(model, {("layers", 0): flags, ("layers", 1): {"deterministic": True}})
    theirs = nnx.clone(model)
    theirs.layers[0].set_attributes(**flags)
    theirs.layers[1].set_attributes(deterministic=True)
    assert nnx.graphdef(ours) == nnx.graphdef(theirs)
    assert Plain.training, "the class is as it was"


def test_a_set_view_with_kwargs_is_given_everything_and_its_flag_is_set_too():
    modes = {"level": 2, "deterministic": True, "other": "x"}
    ours = switched(Open(), {(): modes})
    assert ours.got == nnx.view(Open(), **modes).got == modes
    assert ours.deterministic


def test_a_parent_has_the_last_word_as_in_nnx_view():
    class Parent(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def set_view(self, phase: str | None = None):
            self.drop.deterministic = phase == "eval"

    model = Parent(rngs())
    ours = switched(model, {(): {"phase": "train"}, ("drop",): {"deterministic": True}})
    theirs = nnx.view(model, phase="train", deterministic=True)
    assert ours.drop.deterministic is theirs.drop.deterministic is False


def test_a_set_view_that_raises_is_named():
    class Refuses(nnx.Module):
        def set_view(self, size: int | None = None):
            raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size") as caught:
        switched(nnx.Sequential(Refuses()), {("layers", 0): {"size": 3}})
    assert "'layers/0' (Refuses)" in caught.value.__notes__[0]


def test_a_view_has_shapes_only_and_leaves_the_model():
    model = nnx.BatchNorm(3, rngs=rngs())
    graphdef = nnx.graphdef(model)
    (view,), seen = abstract_view(
        (model,),
        Switches((((), (("use_running_average", True),)),)),
        lambda copy: copy.use_running_average,
    )
    assert seen is True
    assert view.use_running_average
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(view)))
    assert nnx.graphdef(model) == graphdef


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1, 2.0)), ((True,), (1,)), (np.int32(1), 1)],
)
def test_what_python_holds_equal_is_told_apart(a, b):
    assert a == b
    one, other = (Switches((((), (("level", v),)),)) for v in (a, b))
    assert one != other
    assert one == Switches((((), (("level", a),)),))
    assert hash(one) == hash(Switches((((), (("level", a),)),)))


def test_in_words():
    many = tuple((("drop", i), (("deterministic", True),)) for i in range(4))
    assert Switches((*many, ((), (("mode", "x"),)))).in_words() == (
        "deterministic=True on 4 modules, mode='x' on '(root)'"
    )
    assert Switches().in_words() == ""
    assert not Switches()

"""Metrics: a value that is not a scalar causes one warning per name, and never an error."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.inspector.metrics import Metrics
from nnx_inspector.recordings.recording import Recording


class Nameless:
    """Has every attribute, like a mock or a lazy import."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any) -> Any:
        return self


def told_about(**values: Any) -> list[str]:
    metrics = Metrics(Recording(), lambda level, text: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics.add(0, values)
    assert all(w.category is nni.InspectorWarning for w in caught)
    assert len(caught) == metrics.errors
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a", r"'loss' is not a real scalar \('a'\).*a number"),
        (None, r"NoneType"),
        (np.ones(3), r"float64\[3\].*\.mean\(\)"),
        (jnp.ones((2, 1)), r"float32\[2,1\].*\.mean\(\)"),
        (np.array("a"), r"<U1\[\].*a number"),
        ([[1.0], [1.0, 2.0]], r"list"),
        ({"a": 1.0}, r"dict.*keywords"),
        (1 + 1j, r"\(1\+1j\)"),
        (jax.random.key(0), r"key<fry>\[\]"),
        (Nameless(), r"Nameless"),
    ],
)
def test_what_is_no_scalar_is_told_with_a_way_out(value: Any, words: str) -> None:
    (text,) = told_about(loss=value)
    assert re.search(words, text), text


def test_a_tracer_is_told_to_be_returned() -> None:
    texts: list[str] = []
    jax.jit(lambda x: texts.extend(told_about(loss=x)))(1.0)
    (text,) = texts
    assert "Return it from the jitted function" in text


def test_scalars_of_all_kinds_are_taken() -> None:
    recording = Recording()
    metrics = Metrics(recording, lambda level, text: None)
    values = [1, 1.0, True, np.float32(1), np.ones(()), jnp.ones((), jnp.bfloat16)]
    values += [nnx.Variable(jnp.ones(())), float("nan")]
    metrics.add(3, {f"m{i}": value for i, value in enumerate(values)})
    metrics.settle(wait_until=3)
    found = {name: points.tolist() for name, points in recording.curves().items()}
    assert all(found[f"m{i}"] == [[3.0, 1.0]] for i in range(7))
    assert np.isnan(found["m7"][0][1])


@pytest.mark.parametrize("wait_until", [-1, 3])
def test_a_donated_metric_is_told_and_those_after_it_are_recorded(wait_until: int) -> None:
    recording, texts = Recording(), list[str]()
    metrics = Metrics(recording, lambda level, text: texts.append(text))
    lost, kept = jnp.ones(()), jnp.full((), 2.0).block_until_ready()
    metrics.add(3, {"lost": lost, "kept": kept})
    lost.delete()
    metrics.settle(wait_until=wait_until)
    assert texts == ["The metric 'lost' of step 3 was donated and is lost."]
    assert recording.curves()["kept"].tolist() == [[3.0, 2.0]]


def test_a_loop_goes_on_and_each_name_is_told_once(inspect) -> None:
    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    insp = inspect(model, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, batch in enumerate(insp.watch([x] * 3, every=1)):
            model(batch)
            insp.metrics(loss="a", accuracy=np.ones(2), good=float(step))
    names = [str(w.message).split("'")[1] for w in caught]
    assert names == ["loss", "accuracy"]
    assert [w.filename for w in caught] == [__file__] * 2
    texts = inside(insp).notices
    assert any("'accuracy' is not a real scalar (float64[2])" in text for text in texts)
    assert insp.recording.curves()["good"][:, 1].tolist() == [0.0, 1.0, 2.0]


def test_a_call_that_leaves_out_a_name_shows_one_that_does_not(inspect):
    insp = inspect(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    with pytest.raises(TypeError, match=r"insp\.metrics\(loss=0\.3\)"):
        insp.metrics(0.3)
    with pytest.raises(TypeError, match=r"insp\.examples\(batches, 'encoder'\)"):
        insp.examples(jnp.ones((4, 2)))

"""A model that fits on Python's stack without hooks fits with them; the limit is restored."""

import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from call_counts import count_calls
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector import recursion_limit

X = jnp.ones(2)


class Nested(nnx.Module):
    def __init__(self, inner: Any):
        self.w = nnx.Param(jnp.ones(()))
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return x if self.inner is None else self.inner(x) * self.w


class Endless(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return self(x)


def loss_of(model: Any, x: Any) -> Any:
    return model(x).sum()


def nested(depth: int) -> Any:
    model: Any = None
    for _ in range(depth):
        model = Nested(model)
    return model


def in_sequence(depth: int) -> Any:
    """Each module is in an `nnx.List` of the module around it."""
    rngs = nnx.Rngs(0)
    model: Any = nnx.Linear(2, 2, rngs=rngs)
    for _ in range(depth):
        model = nnx.Sequential(nnx.relu, model)
    return model


def side_by_side(width: int) -> Any:
    return nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(width)))


def on_a_stack_of_its_own(work: Any, limit: int = 1000) -> Any:
    """The result of `work`, in a thread: its stack is empty, and pytest's calls do not count."""
    before, results = sys.getrecursionlimit(), []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    sys.setrecursionlimit(limit)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert sys.getrecursionlimit() == limit
    finally:
        sys.setrecursionlimit(before)
    return results[0]


def passing(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    return next_fun(*args, **kwargs)


def intercepted(model: Any) -> Any:
    seen: list[str] = []

    def count(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(context.path)
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(count):
        model(X)
    return seen


@pytest.mark.parametrize("limit", [1000, 10_000])
def test_what_is_intercepted_may_be_as_deep_as_without(limit: int):
    model = nested(480)
    assert on_a_stack_of_its_own(lambda: model(X).shape, limit) == (2,)
    seen = on_a_stack_of_its_own(lambda: intercepted(model), limit)
    assert isinstance(seen, list), seen
    assert len(seen) == 480


def test_a_deep_model_can_be_traced():
    traced = on_a_stack_of_its_own(lambda: nni.trace(nested(200), X))
    assert not isinstance(traced, Exception), traced
    assert [call.depth for call in traced.calls] == list(range(200))


@pytest.mark.parametrize(
    "look",
    [
        lambda model: nni.trace(model, X),
        lambda model: jax.eval_shape(nni.capture(model), X),
        lambda model: nni.Inspector(model, X, display=False).close(),
    ],
    ids=["trace", "capture", "inspect"],
)
@pytest.mark.parametrize("make", [nested, in_sequence, side_by_side])
def test_twice_as_many_modules_are_twice_the_work(look: Any, make: Any):
    def work() -> list[int]:
        look(make(2))  # what is made once
        models = [make(size) for size in (100, 200)]
        return [count_calls(lambda model=model: look(model)) for model in models]

    few, many = on_a_stack_of_its_own(work, limit=10_000)
    assert 20_000 < few < many <= 2.3 * few  # 2.8 if one part is quadratic


def test_a_deep_model_can_be_captured_and_differentiated():
    def shapes(f: Any, *args: Any) -> Any:
        return jax.eval_shape(lambda x: f(*args, x), X)

    model = nested(200)
    out, captured = on_a_stack_of_its_own(lambda: shapes(nni.capture(model)))
    assert (out.shape, len(captured)) == ((2,), 200)
    found = on_a_stack_of_its_own(lambda: shapes(nni.value_and_grad(loss_of), model))
    assert not isinstance(found, Exception), found


@pytest.mark.parametrize("measured", [nni.capture, nni.value_and_grad])
def test_what_is_compiled_grows_with_the_number_of_modules(measured: Any):
    def call(model: Any, x: Any) -> Any:
        return measured(model)(x) if measured is nni.capture else measured(loss_of)(model, x)

    def operations(depth: int) -> int:
        lowered = nnx.jit(lambda model, x: call(model, x)).lower(nested(depth), X)
        return str(lowered.compile().as_text()).count(" = ")

    few, some, many = (operations(depth) for depth in (10, 20, 40))
    assert some - few > 10
    assert many - some < 2.2 * (some - few)  # 2 if each module adds the same, 4 if all before it


@pytest.mark.parametrize("depth", [80, pytest.param(300, marks=pytest.mark.long)])
def test_a_deep_model_is_inspected(depth: int, tmp_path: Any):
    def work() -> Any:
        model = nested(depth)
        insp = nni.Inspector(model, X, display=False)
        inside(insp).rerun.wait_for_first()
        assert insp.run().shape == (2,)
        assert insp.step(loss_of, X) == 2
        step = nnx.jit(nnx.value_and_grad(loss_of))
        assert [step(model, x)[0] for x in insp.watch([X, X], every=1)] == [2, 2]
        insp.save(tmp_path / "deep.nni")
        if depth == 300:  # the units of so many sites take long
            assert insp.to_html(tmp_path / "deep.html") > 0
        insp.close()
        return insp.recording, nni.load(tmp_path / "deep.nni")

    found = on_a_stack_of_its_own(work)
    assert not isinstance(found, Exception), found
    for recording in found:
        assert len(recording.sites) == depth
        assert [p.kind for p in recording.passes] == ["run", "run", "step", "watch", "watch"]


def test_a_recursion_without_end_ends_in_python_s_own_error():
    def work() -> Any:
        with nni.intercept_methods(passing), nni.intercept_methods(passing):
            return Endless()(X)

    assert isinstance(on_a_stack_of_its_own(work), RecursionError)
    assert len(on_a_stack_of_its_own(lambda: intercepted(nested(2)))) == 2


def test_a_sequential_too_deep_for_nnx_jit_ends_in_the_same_error():
    def raised(look: Any) -> Any:
        return on_a_stack_of_its_own(lambda: look(in_sequence(400)))

    own = raised(lambda model: nnx.jit(lambda model, x: model(x))(model, X))
    ours = raised(lambda model: nni.Inspector(model, X, display=False))
    assert type(ours) is type(own) is RecursionError
    assert str(ours).startswith("maximum recursion depth exceeded")


def test_a_limit_that_is_set_in_between_stays():
    before = sys.getrecursionlimit()
    try:
        recursion_limit.borrow(100)
        assert sys.getrecursionlimit() == before + 100
        recursion_limit.borrow(50)
        sys.setrecursionlimit(before + 7)
        recursion_limit.borrow(-100)
        recursion_limit.borrow(-50)
        assert sys.getrecursionlimit() == before + 7
        sys.setrecursionlimit(100_000)  # a limit beyond the C stack is the user's own risk
        recursion_limit.borrow(10)
        assert sys.getrecursionlimit() == 100_000
        recursion_limit.borrow(-10)
        assert sys.getrecursionlimit() == 100_000
    finally:
        sys.setrecursionlimit(before)


def test_a_small_stack_is_left_as_it_is():
    limit, before = sys.getrecursionlimit(), threading.stack_size(2**21)
    try:
        recursion_limit.borrow(500)
        assert sys.getrecursionlimit() == limit
        recursion_limit.borrow(-500)
        assert threading.stack_size(2**21) == 2**21
    finally:
        threading.stack_size(before)


def test_the_limit_is_not_raised_above_what_the_stack_holds():
    before = sys.getrecursionlimit()
    recursion_limit.borrow(10**6)
    most = sys.getrecursionlimit()
    recursion_limit.borrow(-(10**6))
    assert before < most < 20_000
    assert sys.getrecursionlimit() == before

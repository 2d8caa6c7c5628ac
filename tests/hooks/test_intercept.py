"""`intercept_methods` and its dispatch: the calls, their order, and no leftovers."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from interceptors import (
    CallLog,
    double_output,
    pass_through,
    sites_seen,
    warns_of_doubtful_calls,
)
from leftovers import nothing_is_left_behind  # noqa: F401
from models import batch, rngs

from nnx_inspector.hooks import wrapping
from nnx_inspector.hooks.intercept import intercept_methods

# ------------------------------------------------------------ the contract


def test_keyword_arguments_arrive_as_keywords():
    seen = []

    def look(next_fun, args, kwargs, context):
        seen.append((len(args), dict(kwargs)))
        return next_fun(*args, **kwargs)

    model = models.TreeOutput(rngs())
    with intercept_methods(look, only=""):
        model(batch(4, 3), scale=3.0)
    assert seen == [(1, {"scale": 3.0})]


def test_a_call_made_by_an_interceptor_is_intercepted_too():
    log, probe = CallLog(), models.Frozen()

    def calls_another(next_fun, args, kwargs, context):
        return next_fun(*args, **kwargs) + probe(1.0)

    with intercept_methods(calls_another, only=""), intercept_methods(log):
        assert models.MLP(rngs())(batch(1, 3)).shape == (1, 2)
    assert len(log.calls) == 4


def test_something_that_cannot_be_called_is_no_interceptor():
    with pytest.raises(TypeError, match=r"interceptor must be callable .* got str"):
        with intercept_methods("x"):
            pass


def test_an_interceptor_without_a_hash_is_accepted():
    class Unhashable(CallLog):
        __hash__ = None

    log = Unhashable()
    with intercept_methods(log):
        models.Frozen()(1.0)
    assert log.sites == [""]


# -------------------------------------------------------------- the context


def test_the_context_tells_module_method_path_and_number():
    contexts = []

    def look(next_fun, args, kwargs, context):
        contexts.append(context)
        return next_fun(*args, **kwargs)

    model = models.Methods(rngs())
    with intercept_methods(look):
        model(batch(4, 3))
    assert [(c.path, c.method_name, c.site) for c in contexts] == [
        ("", "__call__", ""),
        ("", "encode", ":encode"),
        ("encoder", "__call__", "encoder"),
        ("", "decode", ":decode"),
        ("decoder", "__call__", "decoder"),
        ("", "update", ":update"),
    ]
    assert contexts[0].module is model
    assert contexts[2].module is model.encoder
    assert contexts[1].orig_method.__self__ is model
    assert [c.call for c in contexts] == [0] * 6


def test_calls_of_one_site_are_numbered_and_start_anew_at_the_next_outermost_call():
    model, log = models.Shared(rngs()), CallLog()
    with intercept_methods(log, only="first"):
        model(batch(4, 3))
        model(batch(4, 3))
    assert log.calls == [("first", 0), ("first", 1)] * 2


def test_recursion_is_counted():
    model, log = models.Recursive(rngs()), CallLog()
    with intercept_methods(log):
        model(batch(4, 3))
    assert log.calls == [("", 0), ("linear", 0), ("", 1), ("linear", 1), ("", 2)]


def test_the_same_interceptor_opened_twice_counts_apart():
    model, log = models.Frozen(), CallLog()
    with intercept_methods(log), intercept_methods(log):
        model(1.0)
    assert log.calls == [("", 0), ("", 0)]


def test_a_super_chain_is_one_call_of_one_site():
    """TRAPS: `super().__call__` chains are one site call, with the base class in the tree too."""
    model, log = models.SuperFamily(rngs()), CallLog()
    with intercept_methods(log, only="*"):
        y = model(batch(4, 3))
    assert log.sites == ["base", "inherits", "supers", "twice"]
    np.testing.assert_array_equal(y, model(batch(4, 3)))


def test_a_super_chain_is_one_call_where_the_heir_is_rematerialised():
    model, log = models.RematSuper(rngs()), CallLog()
    with intercept_methods(log):
        model(batch(4, 3))
    assert log.sites == ["", "linear"]


def test_super_of_another_name_is_a_call_of_that_method():
    class Child(models.Methods):
        def decode(self, z):
            return super().encode(super().decode(z))

    log = CallLog()
    with intercept_methods(log, only="**:*"):
        Child(rngs()).decode(batch(3, 2))
    assert log.sites == [":decode", "decoder", ":encode", "encoder"]


def test_static_class_and_private_methods_and_properties_pass_by():
    """TRAPS: with nnx.capture a static method raises TypeError (self is passed)."""
    model, log = models.Methods(rngs()), CallLog()
    with intercept_methods(log):
        assert model.halve(4.0) == 2.0
        assert model.factor == 2.0
        assert model._private(1.0) == 2.0
        assert isinstance(models.Methods.build(rngs()), models.Methods)
    assert log.calls == []


def test_a_generator_method_still_generates():
    """TRAPS: with nnx.capture the generator object is sown."""

    class Generates(nnx.Module):
        def numbers(self):
            yield from (1, 2)

    log = CallLog()
    with intercept_methods(log):
        assert list(Generates().numbers()) == [1, 2]
    assert log.sites == [":numbers"]


# ---------------------------------------------------------- only= and model=


def test_only_that_matches_nothing_is_an_error_when_the_context_is_left():
    with pytest.raises(ValueError, match=r"'blocks/9' matches no site of this model.*'blocks/"):
        with intercept_methods(pass_through, only="blocks/9"):
            models.Nested(rngs())(batch(4, 3))


def test_only_that_matches_nothing_of_the_model_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"'ups' matches no site of this model.*'up'"):
        with intercept_methods(pass_through, only="ups", model=models.MLP(rngs())):
            raise AssertionError("entered")


def test_only_does_not_hide_the_users_own_exception():
    with pytest.raises(models.ForwardError):
        with intercept_methods(pass_through, only="nothing/here"):
            models.Fails(rngs())(batch(4, 3))


def test_only_is_satisfied_when_its_site_sits_in_a_cached_inner_jit():
    """TRAPS: a cached inner nnx.jit is not traced again, so nothing is seen in Python."""
    model, x = models.InnerJit(rngs()), batch(4, 3)
    for _ in range(2):
        with intercept_methods(double_output, only="linear"):
            y = model(x)
        np.testing.assert_allclose(y, np.tanh(2.0 * np.asarray(model.linear(x))), atol=1e-6)


def test_without_model_paths_are_relative_to_the_outermost_module():
    model, log = models.Nested(rngs()), CallLog()
    with intercept_methods(log):
        model.blocks[1](batch(4, 3))
    assert log.sites == ["", "linear"]


def test_with_model_paths_are_relative_to_it_wherever_a_part_is_called():
    model, log = models.Nested(rngs()), CallLog()
    with intercept_methods(log, model=model):
        model.blocks[1](batch(4, 3))
    assert log.sites == ["blocks/1", "blocks/1/linear"]


def test_a_submodule_can_be_the_model():
    model, log = models.Nested(rngs()), CallLog()
    with intercept_methods(log, model=model.blocks[0]):
        model(batch(4, 3))
    assert log.sites == ["", "linear"]


def test_a_submodule_that_was_replaced_in_between_is_found_at_its_path():
    model, log = models.MLP(rngs()), CallLog()
    with intercept_methods(log):
        model(batch(1, 3))
        model.up = nnx.Linear(3, 4, rngs=rngs(1))
        model(batch(1, 3))
    assert log.sites == ["", "up", "down"] * 2


# ------------------------------------------------------------ kinds of class


@pytest.mark.parametrize("name", ["frozen_sealed", "nested", "decorated", "super", "attention"])
def test_every_kind_of_class_is_intercepted_and_gives_the_same_result(name):
    case, log = models.ZOO[name](), CallLog()
    expected = models.ZOO[name]().run()
    with intercept_methods(log):
        y = case.run()
    np.testing.assert_array_equal(y, expected)
    assert {site for site in log.sites} >= {""}


def test_decorated_methods_are_intercepted_outside_their_transform():
    """TRAPS: methods already wrapped by nnx.jit, nnx.remat, nnx.vmap decorators."""
    model, log = models.Decorated(rngs()), CallLog()
    with intercept_methods(log):
        model(batch(4, 3))
    assert log.sites == ["", ":jitted", "linear", ":again", "linear", ":mapped", "linear"]


def test_a_method_reference_taken_before_the_hooks_is_hooked():
    """TRAPS: method references taken before the hooks."""
    model, log = models.MLP(rngs()), CallLog()
    taken = model.__call__
    with intercept_methods(log, model=model):
        taken(batch(4, 3))
    assert log.sites == ["", "up", "down"]


def test_a_method_stored_in_init_is_called_as_ever():
    class Stores(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.activation = jnp.tanh

        def __call__(self, x):
            return self.activation(self.linear(x))

    model, log = Stores(rngs()), CallLog()
    with intercept_methods(log):
        y = model(batch(4, 3))
    np.testing.assert_array_equal(y, model(batch(4, 3)))
    assert log.sites == ["", "linear"]


def test_a_module_made_during_the_forward_pass_has_no_path():
    model, log = models.MakesModule(rngs()), CallLog()
    with intercept_methods(log):
        model(batch(4, 3))
    assert log.sites == ["", "linear", None]


def test_a_class_made_while_another_thread_has_hooks_open_is_intercepted():
    """A background loop keeps the classes wrapped; a class defined since must not be missed."""
    entered, leave = threading.Event(), threading.Event()

    def background():
        with intercept_methods(pass_through):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=background)
    thread.start()
    assert entered.wait(60)
    try:

        class Late(nnx.Module):
            def __call__(self, x):
                return x

        log = CallLog()
        with intercept_methods(log):
            Late()(1.0)
    finally:
        leave.set()
        thread.join()
    assert log.sites == [""]
    assert Late.__call__ not in wrapping._originals  # nothing else knows what is wrapped


def test_a_patch_made_while_hooked_stays_and_is_called_under_later_hooks():
    class Patched(nnx.Module):
        def __call__(self, x):
            return x

    with intercept_methods(pass_through):
        original = Patched.__call__

        @functools.wraps(original)
        def patch(self, x):
            return original(self, x) + 10.0

        Patched.__call__ = patch
    assert Patched()(1.0) == 11.0
    with intercept_methods(double_output):
        assert Patched()(1.0) == 22.0
    assert Patched.__call__ is patch


# ------------------------------------------------------------------- jit


def counted_jit():
    traces = []

    @nnx.jit
    def forward(model, x):
        traces.append(None)
        return model(x)

    return forward, traces


def test_a_function_jitted_before_honours_the_hooks_and_drops_them():
    model, x = models.MLP(rngs()), batch(4, 3)
    forward, _ = counted_jit()
    plain = forward(model, x)
    with intercept_methods(double_output, only="down"):
        np.testing.assert_allclose(forward(model, x), 2.0 * plain, rtol=1e-6)
    np.testing.assert_array_equal(forward(model, x), plain)


def test_a_function_jitted_inside_drops_the_hooks_outside():
    model, x = models.MLP(rngs()), batch(4, 3)
    forward, _ = counted_jit()
    with intercept_methods(double_output, only="down"):
        doubled = forward(model, x)
    np.testing.assert_allclose(doubled, 2.0 * forward(model, x), rtol=1e-6)


def test_another_interceptor_is_another_program():
    model, x = models.MLP(rngs()), batch(4, 3)
    forward, traces = counted_jit()
    with intercept_methods(double_output, only="down"):
        doubled = forward(model, x)
    with intercept_methods(pass_through, only="down"):
        np.testing.assert_allclose(2.0 * forward(model, x), doubled, rtol=1e-6)
    assert len(traces) == 2


def test_a_function_closed_over_the_model_honours_the_hooks():
    """TRAPS: `jax.jit` closures of the model; nnx.capture gives nothing or leaks."""
    model, x = models.MLP(rngs()), batch(4, 3)
    forward = jax.jit(lambda x: model(x))
    plain, log = forward(x), CallLog()
    with intercept_methods(log, model=model):
        np.testing.assert_array_equal(forward(x), plain)
    assert log.sites == ["", "up", "down"]


def test_paths_are_known_inside_jit_for_a_given_model():
    model, log = models.Nested(rngs()), CallLog()
    forward, _ = counted_jit()
    with intercept_methods(log, model=model, only="**/linear"):
        forward(model, batch(4, 3))
    assert log.sites == ["blocks/0/linear", "blocks/1/linear"]


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("scan", {"", "blocks", "blocks/linear"}),
        ("scan_remat", {"", "blocks", "blocks/linear"}),
        ("ensemble", {"", "members"}),
        ("while", {"", "linear"}),
        ("cond", {"", "positive", "negative"}),
        ("inner_jit", {"", "linear"}),
        ("rnn", {"", "rnn", "rnn/cell", "rnn/cell/dense_h", "rnn/cell/dense_i"}),
    ],
)
def test_paths_are_known_inside_every_transform(name, sites):
    case, log = models.ZOO[name](), CallLog()
    with intercept_methods(log, model=case.model, only="**"):
        case.run()
    assert set(log.sites) == sites


def test_a_module_level_jit_works_inside_two_outer_traces_with_equal_hooks():
    """TRAPS: a cached inner jit called inside two outer traces with an equal plan."""
    model, x = models.InnerJit(rngs()), batch(4, 3)
    first = nnx.jit(lambda model, x: model(x) + 0.0)
    second = nnx.jit(lambda model, x: model(x) * 1.0)
    with intercept_methods(double_output, only="linear"):
        np.testing.assert_allclose(first(model, x), second(model, x), atol=1e-6)


def test_checking_leaks_is_clean():
    case = models.ZOO["scan_remat"]()
    with jax.checking_leaks(), intercept_methods(pass_through, model=case.model):
        nnx.jit(lambda m, x: m(x))(case.model, *case.args)


# --------------------------------------------------- copies, clones, twins


def test_a_clone_made_while_hooked_is_not_the_model():
    """TRAPS: a clone made while hooked: never attribute one's calls to the other."""
    model = models.MLP(rngs())
    with warns_of_doubtful_calls():
        assert sites_seen(model, lambda: nnx.clone(model)(batch(4, 3))) == []


def test_a_deep_copy_made_while_hooked_is_not_the_model():
    model = models.MLP(rngs())
    with warns_of_doubtful_calls():
        assert sites_seen(model, lambda: copy.deepcopy(model)(batch(4, 3))) == []


def test_an_ema_copy_made_while_hooked_is_not_the_model():
    model, ema = models.MLP(rngs()), models.MLP(rngs(1))

    def run():
        jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, model)(batch(4, 3))

    assert sites_seen(model, run) == []


def test_a_tree_map_with_an_older_clone_works_while_hooked():
    """TRAPS: a tagged model and an older clone cannot be tree-mapped together."""
    model = models.MLP(rngs())
    older = nnx.clone(model)
    with intercept_methods(pass_through, model=model):
        model(batch(4, 3))
        mean = jax.tree.map(lambda a, b: (a + b) / 2, model, older)
    np.testing.assert_array_equal(mean(batch(4, 3)), model(batch(4, 3)))


def test_a_clone_made_while_hooked_is_equal_to_one_made_before():
    """TRAPS: a clone made while tagged stays unequal."""
    model = models.MLP(rngs())
    before = nnx.clone(model)
    with intercept_methods(pass_through, model=model):
        model(batch(4, 3))
        during = nnx.clone(model)
    assert nnx.graphdef(during) == nnx.graphdef(before)
    assert jax.tree.structure(during) == jax.tree.structure(before)


def test_a_model_merged_after_the_hooks_from_a_graphdef_of_within_is_as_any_other():
    model = models.MLP(rngs())
    with intercept_methods(pass_through, model=model):
        graphdef, state = nnx.split(model)
    merged = nnx.merge(graphdef, state)
    assert nnx.graphdef(merged) == nnx.graphdef(model)
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_a_model_pickled_while_hooked_is_as_any_other():
    model, x = models.MLP(rngs()), batch(4, 3)
    with intercept_methods(pass_through, model=model):
        model(x)
        text = pickle.dumps(model)
    assert b"nnx_inspector" not in text
    copied = pickle.loads(text)
    assert nnx.graphdef(copied) == nnx.graphdef(model)
    np.testing.assert_array_equal(copied(x), model(x))


def test_teacher_and_student_of_equal_structure_in_one_jit_are_told_apart():
    """TRAPS: teacher and student of equal structure in one jit."""
    student, teacher, x = models.MLP(rngs(0)), models.MLP(rngs(1)), batch(4, 3)

    @nnx.jit
    def both(teacher, student, x):
        return teacher(x), student(x)

    plain_teacher, plain_student = both(teacher, student, x)
    with intercept_methods(double_output, model=student, only=""):
        t, s = both(teacher, student, x)
    np.testing.assert_array_equal(t, plain_teacher)
    np.testing.assert_allclose(s, 2.0 * plain_student, rtol=1e-6)


def test_a_program_compiled_for_the_model_is_not_used_for_its_twin():
    model, twin, x = models.MLP(rngs(0)), models.MLP(rngs(1)), batch(4, 3)
    forward, _ = counted_jit()
    plain = forward(twin, x)
    with intercept_methods(double_output, model=model, only=""):
        forward(model, x)
        np.testing.assert_array_equal(forward(twin, x), plain)


def test_a_clone_made_inside_jit_is_not_the_model():
    model, log = models.MLP(rngs()), CallLog()

    @nnx.jit
    def run(model, x):
        return nnx.clone(model)(x)

    with warns_of_doubtful_calls(), intercept_methods(log, model=model):
        run(model, batch(4, 3))
    assert log.calls == []


def test_the_functional_style_inside_jit_is_attributed():
    """Split outside, merge inside: the stand-in of the model in that trace."""
    model, log = models.MLP(rngs()), CallLog()
    with intercept_methods(log, model=model):
        graphdef, state = nnx.split(model)
        jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, batch(4, 3))
    assert log.sites == ["", "up", "down"]


def test_a_teacher_merged_from_the_students_graphdef_is_not_the_model():
    """TRAPS: never attribute one's calls to the other."""
    model, log = models.MLP(rngs()), CallLog()
    with warns_of_doubtful_calls(), intercept_methods(log, model=model, only=""):
        graphdef, state = nnx.split(model)
        teacher_state = jax.tree.map(lambda x: x + 1.0, state)

        @jax.jit
        def both(state, teacher_state, x):
            student, teacher = nnx.merge(graphdef, state), nnx.merge(graphdef, teacher_state)
            return student(x), teacher(x)

        both(state, teacher_state, batch(4, 3))
    assert log.sites == [""]


def test_calls_of_an_older_graphdef_are_not_attributed():
    """TRAPS: older graphdefs cannot be seen: never adopt a look-alike."""
    model, log = models.MLP(rngs()), CallLog()
    graphdef, state = nnx.split(model)
    with warns_of_doubtful_calls(), intercept_methods(log, model=model):
        jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, batch(4, 3))
    assert log.calls == []


def test_a_cached_partial_made_before_is_not_attributed_and_works():
    """TRAPS: nnx.cached_partial made before the hooks."""
    model, x, log = models.MLP(rngs()), batch(4, 3), CallLog()
    forward = nnx.cached_partial(nnx.jit(lambda m, x: m(x)), model)
    plain = forward(x)
    with warns_of_doubtful_calls(), intercept_methods(log, model=model):
        np.testing.assert_array_equal(forward(x), plain)
    assert log.calls == []


def test_a_cached_partial_made_while_hooked_works_afterwards():
    model, x = models.MLP(rngs()), batch(4, 3)
    with intercept_methods(pass_through, model=model):
        forward = nnx.cached_partial(nnx.jit(lambda m, x: m(x)), model)
        inside = forward(x)
    np.testing.assert_allclose(forward(x), inside, rtol=1e-6)


def test_a_model_is_freed_after_the_hooks_though_its_programs_stay_cached():
    forward, _ = counted_jit()
    model = models.MLP(rngs())
    gone = weakref.ref(model)
    with intercept_methods(pass_through, model=model):
        forward(model, batch(4, 3))
    del model
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ threads


def test_another_threads_exit_leaves_the_hooks_of_this_one():
    model, log = models.MLP(rngs()), CallLog()

    def other():
        with intercept_methods(pass_through):
            pass

    with intercept_methods(log):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        model(batch(4, 3))
    assert log.sites == ["", "up", "down"]


# ------------------------------------------------------------ what is left


def test_with_no_hook_active_a_class_is_its_own():
    """There is no overhead outside a region: no wrapper remains."""
    before = vars(models.MLP)["__call__"]
    with intercept_methods(pass_through):
        assert vars(models.MLP)["__call__"] is not before
        assert "__call__" in vars(models.Inherits)
    assert vars(models.MLP)["__call__"] is before
    assert "__call__" not in vars(models.Inherits)


def test_an_exception_in_the_forward_pass_is_the_users_and_leaves_nothing():
    """TRAPS: `__captures__` stays on every module, the graphdef has changed."""
    model = models.Fails(rngs())
    before = nnx.graphdef(model)
    with pytest.raises(models.ForwardError, match=r"^the user's own$"):
        with intercept_methods(pass_through, model=model):
            model(batch(4, 3))
    assert nnx.graphdef(model) == before
    assert vars(models.Fails)["__call__"].__qualname__ == "Fails.__call__"
    assert models.Fails.__call__ not in wrapping._originals  # nothing else knows what is wrapped


def test_instances_and_graphdef_are_untouched_while_hooked_and_after():
    model = models.Nested(rngs())
    attributes = {path: dict(vars(m)) for path, m in nnx.iter_modules(model)}
    graphdef = nnx.graphdef(model)
    with intercept_methods(pass_through, model=model):
        nnx.jit(lambda m, x: m(x))(model, batch(4, 3))
        during = {path: set(vars(m)) for path, m in nnx.iter_modules(model)}
    assert during == {path: set(names) for path, names in attributes.items()}
    after = {path: dict(vars(m)) for path, m in nnx.iter_modules(model)}
    for path, names in attributes.items():
        assert after[path].keys() == names.keys()
        nodes = after[path]["_pytree__nodes"]
        assert type(nodes) is type(names["_pytree__nodes"])
        assert nodes == names["_pytree__nodes"]
    assert nnx.graphdef(model) == graphdef


# ------------------------------------------------ beside flax's own capture


@pytest.mark.parametrize("where", ["inside", "around"])
def test_the_users_method_outputs_work(where):
    """TRAPS: hooks taken inside a capture region must not save capture's wrapper."""
    x = batch(4, 3)
    plain = models.MLP(rngs())(x)
    model, log = models.MLP(rngs()), CallLog()

    def run(model, x):
        with intercept_methods(log):
            return model(x)

    if where == "inside":
        with intercept_methods(log):
            y, sown = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
    else:
        y, sown = nnx.capture(run, nnx.Intermediate, method_outputs=nnx.Intermediate)(model, x)
    np.testing.assert_array_equal(y, plain)
    assert {"up", "down"} <= set(sown)
    assert log.sites == ["", "up", "down"]
    np.testing.assert_array_equal(models.MLP(rngs())(x), plain)

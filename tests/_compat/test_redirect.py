"""`redirect`: calls by every reference go to the target, until it is undone."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_inspector._compat.redirect import can_redirect, copy_of, redirect


class Base:
    def method(self, a, b=2, *, c=3):
        return (type(self).__name__, a, b, c)


class Derived(Base):
    def method(self, a, b=20, *, c=30):
        """Its own text."""
        return ("derived", b, super().method(a, c=c))


def redirected(function):
    original = copy_of(function)
    seen = []

    def target(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    return redirect(function, target, original), seen


def test_a_bound_method_taken_before_leads_elsewhere_and_does_the_same():
    instance = Derived()
    taken = instance.method
    plain = taken(1, c=5)
    redirection, seen = redirected(Derived.method)
    assert taken(1, c=5) == plain
    assert seen == [((instance, 1), {"c": 5})]
    redirection.undo()
    assert taken(1, c=5) == plain
    assert len(seen) == 1


@given(a=st.integers(), b=st.none() | st.integers(), c=st.none() | st.integers())
def test_defaults_and_closures_are_those_of_the_function(a, b, c):
    positional = (a,) if b is None else (a, b)
    keywords = {} if c is None else {"c": c}
    plain = Derived().method(*positional, **keywords)
    redirection, seen = redirected(Derived.method)
    try:
        assert Derived().method(*positional, **keywords) == plain
    finally:
        redirection.undo()
    assert len(seen) == 1


def test_the_function_is_afterwards_what_it_was():
    code, names = Derived.method.__code__, dict(Derived.method.__dict__)
    redirection, _ = redirected(Derived.method)
    assert Derived.method.__code__ is not code
    redirection.undo()
    assert Derived.method.__code__ is code
    assert Derived.method.__dict__ == names


def test_the_signature_name_place_and_text_can_still_be_read():
    signature = inspect.signature(Derived.method)
    source = inspect.getsource(Derived.method)
    redirection, _ = redirected(Derived.method)
    try:
        assert inspect.signature(Derived.method) == signature
        assert inspect.getsource(Derived.method) == source
        assert Derived.method.__doc__ == "Its own text."
        assert Derived.method.__code__.co_qualname == "Derived.method"
    finally:
        redirection.undo()


def test_a_function_that_wraps_another_keeps_saying_so():
    def inner():
        return 1

    def outer():
        return inner() + 1

    outer.__wrapped__ = inner
    redirection, seen = redirected(outer)
    assert outer() == 2
    assert outer.__wrapped__ is inner
    redirection.undo()
    assert outer.__wrapped__ is inner
    assert len(seen) == 1


def generator():
    yield 1


async def coroutine():
    pass


async def asynchronous_generator():
    yield 1


@pytest.mark.parametrize("function", [generator, coroutine, asynchronous_generator])
def test_a_function_that_runs_later_than_its_call_is_not_redirected(function):
    """Python 3.13 warns of the code of another kind of function, and may come to refuse it."""
    assert not can_redirect(function)
    assert can_redirect(Derived.method)


def test_ten_thousand_times_leave_nothing_behind():
    code = Base.method.__code__
    for _ in range(10_000):
        redirected(Base.method)[0].undo()
    assert Base.method.__code__ is code
    assert Base().method(1) == ("Base", 1, 2, 3)

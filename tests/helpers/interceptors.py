"""Helpers for the tests of hooks: interceptors, a watched region, ways of calling a model."""

from __future__ import annotations

import contextlib

import pytest

from nnx_inspector.errors import InspectorWarning
from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.live.session import Session


def pass_through(next_fun, args, kwargs, context):
    return next_fun(*args, **kwargs)


def double_output(next_fun, args, kwargs, context):
    return 2.0 * next_fun(*args, **kwargs)


@contextlib.contextmanager
def watch_session(model, **options):
    """A session over the passes inside; their figures are in `arrived` afterwards."""
    session = Session(model, **options)
    session.arrived = {}
    try:
        with session.open():
            yield session
        session.arrived = session.take()
        assert session.errors == []
    finally:
        session.close()


def call_model(model, x):
    return model(x)


def loss_fn(model, x):
    return (model(x) ** 2).sum()


def warns_of_doubtful_calls(calls="1 of MLP, 2 of Linear"):
    return pytest.warns(InspectorWarning, match=f"could not be attributed to it: {calls}")


class CallLog:
    """An interceptor that records the site and number of each call, in the order of entry."""

    def __init__(self):
        self.calls = []

    def __call__(self, next_fun, args, kwargs, context):
        self.calls.append((context.site, context.call))
        return next_fun(*args, **kwargs)

    @property
    def sites(self):
        return [site for site, _ in self.calls]


def sites_seen(model, run):
    """The sites of the model's calls that an interceptor sees while `run()` runs."""
    log = CallLog()
    with intercept_methods(log, model=model):
        run()
    return log.sites

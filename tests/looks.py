"""Small things that tests of hooks share: interceptors, a watched region, ways of calling."""

from __future__ import annotations

import contextlib

from nnx_inspector.watching import Session


class Log:
    """An interceptor that notes each call's site."""

    def __init__(self):
        self.sites = []

    def __call__(self, next_fun, args, kwargs, context):
        self.sites.append(context.site)
        return next_fun(*args, **kwargs)


def passing(next_fun, args, kwargs, context):
    return next_fun(*args, **kwargs)


def doubling(next_fun, args, kwargs, context):
    return 2.0 * next_fun(*args, **kwargs)


@contextlib.contextmanager
def watching(model, **options):
    """A session over the passes inside; what arrived is in `arrived` afterwards."""
    session = Session(model, **options)
    session.arrived = {}
    try:
        with session.open():
            yield session
        session.arrived = session.take()
        assert session.errors == []
    finally:
        session.close()


def call(model, x):
    return model(x)


def loss_fn(model, x):
    return (model(x) ** 2).sum()

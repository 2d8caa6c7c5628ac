"""Messages to the browser for the panel of the flow between modules."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.headers import Struct, ToBrowser


class FlowNode(Struct):
    """A node of a `Flow`. `role` is a "module" called in it; its "input" or "output"; a "join",
    which is one value made of several; or "outside", a module elsewhere whose value enters or
    leaves by another way than arguments and results. `name` is the key relative to the flow's site.
    `output` describes the value that it returns (for an "output", the value that it receives).
    `calls` counts the calls in one call of the site; `times` includes the loops around them (None:
    a while loop). `conditional`: it is called in a branch that may not be taken.
    """

    role: Literal["module", "input", "output", "join", "outside"]
    site: str
    name: str
    kind: str
    output: str
    calls: int
    times: int | None
    conditional: bool


class FlowEdge(Struct):
    """Values that go from one node to another, both given by number. `shapes` holds their dtypes
    and shapes, if known. `loop`: they go from one iteration of a loop to a later one.
    """

    producer: int
    consumer: int
    shapes: tuple[str, ...]
    loop: bool


class FlowAbsent(Struct):
    """A module below a flow's site that is not called in it, and why."""

    site: str
    why: str


class Flow(ToBrowser, type="flow"):
    """The flow between the modules that a site calls. `id` is the request's. Buffer: none."""

    layout: int
    site: str
    id: int
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...]
    absent: tuple[FlowAbsent, ...]


class LayoutLibrary(ToBrowser, type="layout_library"):
    """The script that lays out a flow. Buffer: a JavaScript module in UTF-8, `static/layout.js`."""

"""The built front end, as text.

Invariant: the text of a widget stays small, because ipywidgets sends it with every widget and saves
it in the metadata of notebooks. Knows no widget.
"""

from __future__ import annotations

import base64
import gzip
import pathlib

from nnx_inspector.errors import InspectorError

_STATIC = pathlib.Path(__file__).parents[2] / "static"

_UNPACKING = """\
// widget.js, deflated: ipywidgets saves this text in the metadata of notebooks
const packed = Uint8Array.from(atob("%s"), (character) => character.charCodeAt(0));
const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const script = new Blob([await new Response(inflated).arrayBuffer()], { type: "text/javascript" });
const url = URL.createObjectURL(script);
const widget = await import(url);
URL.revokeObjectURL(url);
export default widget.default;
"""


def asset(name: str) -> str:
    """Return the text of a file of the built front end."""
    path = _STATIC / name
    if not path.exists():
        raise InspectorError(
            f"The front end is not built: {name} is missing from the installed package. Install "
            f"the package with pip from its folder (pip install .), which builds it."
        )
    return path.read_text(encoding="utf-8")


def packed_module(name: str) -> str:
    """A module of the front end as a module that unpacks itself, half as long."""
    packed = gzip.compress(asset(name).encode(), 9, mtime=0)
    return _UNPACKING % base64.b64encode(packed).decode()

"""One HTML file that shows a recording offline: the front end, and the recording that it replays.

Invariants: the file makes no network requests (its content security policy forbids them), and no
text of a model is markup in it. Knows no jax and no model.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from typing import Final

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.export.assets import asset
from nnx_inspector.screen.export.replay import PageContent, pack_passes
from nnx_inspector.screen.export.text import one_line

MAX_BYTES: Final = 16 * 2**20
MOST_UNPACKED: Final = 256 * 2**20
"""The most bytes of the packed numbers before they are deflated: the browser's memory for them."""
_SCRIPT_BREAKERS: Final = ("</script", "<!--", "<script")

_STYLE: Final = """
body { margin: 0; }
.nni-root { margin: 0; }
.nni-view { --nni-height: 100vh; min-height: 480px; border: 0; border-radius: 0; resize: none; }
noscript { display: block; padding: 1em; font-family: sans-serif; }
"""
"""The style of the page around the screen, which fills it."""

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="nni-page"><noscript>This page needs JavaScript, which it carries itself.</noscript></main>
<script type="application/octet-stream" id="nni-recording">{recording}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(
    recording: Recording, content: PageContent, *, title: str, max_bytes: int = MAX_BYTES
) -> str:
    """The text of a page that shows a recording.

    If the recording does not fit, evenly spaced passes are kept; the page says how many it has.

    Raises:
        InspectorError: two passes do not fit, or the front end is not built.
        ValueError: `max_bytes` is not a positive number.
    """
    if not max_bytes > 0:
        raise ValueError(f"max_bytes must be a positive number of bytes, got {max_bytes!r}.")
    before, after = page_shell(title)
    shell = len((before + after).encode())
    room = max_bytes - shell
    most = min(len(recording.passes), _first_guess(recording, room))
    while True:
        packed, size, shown = pack_passes(recording, content, most)
        over = max(len(packed) / max(room, 1), size / MOST_UNPACKED)
        if over <= 1:
            return before + packed + after
        if shown <= 2:
            raise InspectorError(
                f"A page of this recording takes {shell + len(packed):,} bytes even with "
                f"{shown} of its passes, and max_bytes is {max_bytes:,}. Allow more."
            )
        most = max(2, min(shown - 1, math.floor(shown / over * 0.95)))


def page_shell(title: str) -> tuple[str, str]:
    """The page's text before and after the recording, which is base64."""
    style, script = asset("widget.css") + _STYLE, asset("page.js")
    if any(breaker in script.lower() for breaker in _SCRIPT_BREAKERS) or "</style" in style:
        raise InspectorError("The built front end cannot be put into a page. Build it again.")
    # data URLs: pictures in the style sheet; blobs: the layout library, which runs as a worker
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' blob:; worker-src blob:; "
        f"style-src '{_hash(style)}'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head, _, foot = _PAGE.partition("{recording}")
    before = head.format(
        policy=html.escape(policy), title=html.escape(one_line(title)[:200]), style=style
    )
    return before, foot.format(script=script)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _first_guess(recording: Recording, room: int) -> int:
    """A first guess at how many passes fit, from their size in memory."""
    each = max(1.0, recording.nbytes / max(1, len(recording)))
    return max(2, math.ceil(2 * max(room, 0) / each))

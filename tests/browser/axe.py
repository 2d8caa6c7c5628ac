"""axe-core on a page of the browser tests: the violations of the WCAG in the view, as text."""

from __future__ import annotations

import pathlib
from typing import Any

from playwright.sync_api import Page

AXE = pathlib.Path(__file__).parents[2] / "js" / "node_modules" / "axe-core" / "axe.min.js"
RUN = """
async root => (await axe.run(root, {resultTypes: ['violations'], elementRef: false})).violations
    .filter(v => v.impact === 'serious' || v.impact === 'critical')
    .map(v => `${v.id}: ${v.help}: ` + v.nodes.slice(0, 4).map(n =>
        [n.target, n.html.slice(0, 160), [...n.any, ...n.all, ...n.none][0]?.message].join(' ')
    ).join(' | '))
"""


def violations(page: Page, root: Any) -> list[str]:
    """The serious and critical violations within `root` (an element), by axe-core."""
    if not page.evaluate("'axe' in window"):
        source = AXE.read_text(encoding="utf-8")
        # RequireJS, if present, would treat the script as one of its modules
        page.add_script_tag(content=f"(() => {{ const define = undefined; {source} }})();")
    return root.evaluate(RUN)

"""What Sphinx makes a site of: the pages of `notebooks/`, its notebooks, and the docstrings.

`python -m sphinx -W --keep-going -c notebooks/docs notebooks dist/site` from the top of the
checkout. Nothing is executed and nothing is fetched meanwhile: the tests run every block of code,
and what the notebooks showed when they ran is taken from the folder NNX_INSPECTOR_EXECUTED.
"""

from __future__ import annotations

import os
import pathlib
import tomllib
from typing import Any

import nbformat
import plotly.io

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"].replace("-", "_")
author = "The nnx_inspector authors"
version = release = PROJECT["version"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/.ipynb_checkpoints"]

# pages
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
WIDGET = "application/vnd.jupyter.widget-view+json"
FIGURE = "application/vnd.plotly.v1+json"

# reference
default_role = "py:obj"  # `name` links to what is on the site, and is code where nothing is
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

# looks
html_theme = "furo"
PLOTLY = pathlib.Path(plotly.__file__).with_name("package_data") / "plotly.min.js"
html_static_path, html_css_files = ["site.css", str(PLOTLY)], ["site.css"]
html_title = f"nnx_inspector {release}"
html_copy_source = html_show_copyright = html_show_sphinx = False
pygments_style, pygments_dark_style = "tango", "monokai"


def with_outputs(app: Any, name: str, source: list[str]) -> None:
    """Take a notebook as it was executed, where it was, and is still the same notebook."""
    folder = os.environ.get("NNX_INSPECTOR_EXECUTED", "")
    executed = pathlib.Path(folder, f"{name}.ipynb")
    if not folder or not executed.is_file():
        return
    text = executed.read_text(encoding="utf-8")
    there, here = nbformat.reads(text, as_version=4), nbformat.reads(source[0], as_version=4)
    if [cell.source for cell in there.cells] != [cell.source for cell in here.cells]:
        raise ValueError(f"{executed} was executed before {name}.ipynb changed. Run it again.")
    for cell in there.cells:
        # a live widget needs a kernel and a CDN; its last state, as plain HTML, stands beside it
        if cell.cell_type == "code":
            shown = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
            cell.outputs = [drawn(o) if FIGURE in o.get("data", {}) else o for o in shown]
    source[0] = nbformat.writes(there)


def drawn(output: Any) -> Any:
    """A plotly figure as HTML that finds its script in the site."""
    figure = dict(output.data[FIGURE])
    config = figure.pop("config", {})
    script = f"_static/{PLOTLY.name}"  # of a page at the top of the site, as all notebooks are
    html = plotly.io.to_html(figure, config=config, include_plotlyjs=script, full_html=False)
    return nbformat.v4.new_output("display_data", {"text/html": html})


def setup(app: Any) -> None:
    app.connect("source-read", with_outputs)

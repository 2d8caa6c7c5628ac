"""An inspector and a recorded run where a widget is asked for.

Their pages, reports and figures are in `inspector/test_export`, `test_markdown` and `test_run`.
"""

import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni


@pytest.mark.parametrize("kind", ["inspector", "run"])
def test_what_shows_a_widget_can_be_passed_for_it(kind, tmp_path):
    """As marimo's `mo.ui.anywidget` does, which reads these four names."""
    shown = insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    if kind == "run":
        insp.save(tmp_path / "run.nni")
        shown = nni.open(tmp_path / "run.nni")
    (view,) = [value for name, value in shown._repr_mimebundle_()[0].items() if "view" in name]
    # what a front end of ipywidgets 7 reads
    assert shown._model_id == view["model_id"] == shown.comm.comm_id
    assert shown.get_state()["role"] == "control"
    shown.set_state({"version": 10**6})
    assert shown.get_state()["version"] == 10**6
    shown.close()
    insp.close()

"""The load on a page while 200 sites stream: frames, backlog, heap, and a click to its detail.

In a real JupyterLab and Chromium: `python tests/benchmarks/streaming.py [minutes]`. First 30 passes
a second for a third of the time, of which every one should be drawn; then as many as there is room
for. Prints a table; asserts nothing. The kernel and the page share this machine's cores.
"""

from __future__ import annotations

import gzip
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from browser.lab import Lab  # noqa: E402
from browser.notebook import Notebook  # noqa: E402
from browser.view import View  # noqa: E402
from playwright.sync_api import CDPSession  # noqa: E402

SITES = 200
MODEL = f"""
import pathlib, threading, time
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Deep(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range({SITES - 2})])
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model, x = Deep(nnx.Rngs(0)), jnp.ones((8, 4))
insp = nni.Inspector(model, x, display=False)
record = nni.capture(model)(x)[1]
insp.push(record)  # in place of a first pass, whose program would be compiled meanwhile
insp
"""
STREAM = """
pushed = 0
summaries = record.merged()
def stream(rate, seconds, each):
    global pushed
    due = time.monotonic()
    end = due + seconds
    while due < end:
        if pushed % each == 0:
            insp._core.step += 1
            insp._core.recording.append(insp._core.step, summaries)
        insp._core.view.present()
        pushed += 1
        due = max(due, time.monotonic() - 1 / rate) + 1 / rate
        time.sleep(max(due - time.monotonic(), 0))
    insp._core.view.present(force=True)  # as at the end of a loop
"""
START = "stream({rate}, {seconds}, {each})"
SENT = (
    "(lambda s: [s._seq, s._acknowledged, s.dropped, pushed, time.process_time()])"
    "(insp._core.view.screen)"
)
COUNT = """
if (!window.nniDrawn) {
  window.nniDrawn = [];
  const comm = kernel._comms.get(arg), send = comm.send.bind(comm);
  comm.send = (data, ...rest) => {
    if (data?.content?.type === 'ack') nniDrawn.push([performance.now(), data.content.seq]);
    return send(data, ...rest);
  };
}
"""
STEPS = """
root => {
  const step = root.querySelector('[data-testid="nni-step"]');
  window.nniSteps = new Set([step.dataset.value]);
  const look = () => { nniSteps.add(step.dataset.value); };
  new MutationObserver(look).observe(step, { attributes: true });
}
"""
HEAP = "() => { window.gc?.(); return performance.memory.usedJSHeapSize / 1e6 }"
CLICK = """
([root, site]) => new Promise(resolve => {
  const row = root.querySelector(`[data-testid="nni-row"][data-site="${site}"]`);
  const start = performance.now();
  row.click();
  const look = () => root.querySelector('[data-testid="nni-selected"]').dataset.value === site
    ? resolve(performance.now() - start) : requestAnimationFrame(look);
  look();
})
"""


def busy(devtools: CDPSession) -> float:
    """The seconds of a processor that the page's main thread took so far."""
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def every_pass(notebook: Notebook, view: View, seconds: float) -> list[tuple[str, str]]:
    """30 passes a second, each recorded: how many were sent and drawn."""
    view.root.evaluate(STEPS)
    devtools = notebook.page.context.new_cdp_session(notebook.page)
    devtools.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
    devtools.send("Performance.enable")
    before, drew = notebook.ask(SENT), busy(devtools)
    notebook.run(
        notebook.append(START.format(rate=30, seconds=seconds, each=1)), seconds=seconds + 60
    )
    sent, _, dropped, pushed, took = (
        now - then for now, then in zip(notebook.ask(SENT), before, strict=True)
    )
    last = notebook.ask("insp._core.step")
    view.wait("nni-step", "value === arg", last)
    drawn = notebook.page.evaluate("window.nniSteps.size") - 1
    page = busy(devtools) - drew
    return [
        ("30 passes a second: measured", f"{pushed / seconds:.1f}"),
        ("passes, frames sent, frames drawn", f"{pushed}, {sent}, {drawn}"),
        ("frames left out", str(dropped)),
        (
            "processor time a pass, ms: kernel, page",
            f"{1000 * took / pushed:.1f}, {1000 * page / pushed:.1f}",
        ),
    ]


def measure(notebook: Notebook, minutes: float) -> list[tuple[str, str]]:
    """The rows of the table."""
    page = notebook.page
    notebook.run(0, seconds=300)
    view = View(notebook.cell(0))
    view.wait("nni-stat-output-size", "value > 0")
    comm = notebook.ask("insp._core.view.screen.control.comm.comm_id")
    notebook.evaluate(COUNT, comm)
    notebook.run(notebook.append(STREAM))
    rows = every_pass(notebook, view, minutes * 20)
    most = START.format(rate=120, seconds=minutes * 40, each=50)
    notebook.run(notebook.append(f"insp.background(lambda: {most})"))
    heaps, backlogs, clicks = [], [], []
    rounds = max(3, int(minutes * 4))
    for i in range(rounds):
        page.wait_for_timeout(minutes * 40_000 / rounds * 0.9)
        sent, acknowledged, dropped, *_ = notebook.ask(SENT)
        backlogs.append(sent - acknowledged)
        heaps.append(page.evaluate(HEAP))
        site = view.rows()[3 + i % 5]
        clicks.append(page.evaluate(CLICK, [view.root.element_handle(), site]))
    drawn_at = page.evaluate("window.nniDrawn.map(d => d[0])")
    seconds = (drawn_at[-1] - drawn_at[0]) / 1000
    # an acknowledgement is of all frames before it; frames are never nearer than two of the page's
    first, last = page.evaluate("[window.nniDrawn[0][1], window.nniDrawn.at(-1)[1]]")
    script = (pathlib.Path(ROOT) / "nnx_inspector" / "static" / "widget.js").read_bytes()
    style = (pathlib.Path(ROOT) / "nnx_inspector" / "static" / "widget.css").read_bytes()
    size = len(gzip.compress(script)) + len(gzip.compress(style))
    half = len(heaps) // 2
    return [
        ("sites", str(SITES)),
        *rows,
        ("120 a second: for", f"{seconds:.0f} s"),
        ("frames drawn a second", f"{(last - first) / seconds:.1f}"),
        ("frames not drawn yet: each sample", " ".join(map(str, backlogs))),
        ("frames left out", str(dropped)),
        ("heap, first half, MB (median)", f"{statistics.median(heaps[:half]):.1f}"),
        ("heap, second half, MB (median)", f"{statistics.median(heaps[half:]):.1f}"),
        (
            "click to detail, ms (median, worst)",
            f"{statistics.median(clicks):.0f}, {max(clicks):.0f}",
        ),
        ("bundle, script and style, gzip", f"{size / 1000:.1f} kB"),
        ("errors on the page", str(len(notebook.errors))),
    ]


def main() -> None:
    """Measure and print."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as root, Lab(pathlib.Path(root)) as lab:
        with lab.notebook("streaming.ipynb", [MODEL]) as notebook:
            for name, value in measure(notebook, minutes):
                print(f"{name:40} {value}")


if __name__ == "__main__":
    main()

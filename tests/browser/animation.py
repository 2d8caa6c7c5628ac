"""Makes the moving picture of the README: a layer is switched off and on while a cell trains.

    python -m tests.browser.animation [folder]

The quickstart runs in a real JupyterLab; each frame is a screenshot, taken at an even pace and
shown at the same pace. With a folder, the frames are kept there too. Asserts nothing but the size.
"""

from __future__ import annotations

import io
import pathlib
import shutil
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from browser.lab import Lab  # noqa: E402 - of the tests, which are no package
from browser.notebook import Notebook  # noqa: E402
from browser.test_quickstart import INSPECTOR, LOOP, MODEL, NOTEBOOK, STEP  # noqa: E402
from browser.view import View  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import expect  # noqa: E402

PICTURE = ROOT / "notebooks" / "images" / "toggle.webp"
LARGEST = 400_000
WIDTH, HEIGHT = 1400, 660
"""Of the page, and of what is taken of the widget, in pixels."""
SHOWN = 1000
"""The width of the picture in pixels."""
PACE = 0.4
"""Seconds from one frame to the next."""
TRAIN = """
for batch in insp.watch(UntilStopped(), every=4):
    loss, aux = train_step(model, optimizer, batch)
    insp.metrics(loss=loss, accuracy=aux["accuracy"])
"""


class Film:
    """The frames taken so far, of the widget's upper part."""

    def __init__(self, notebook: Notebook, view: View):
        self._page, self._root = notebook.page, view.root
        self.frames: list[Image.Image] = []

    def take(self, seconds: float) -> None:
        """Frames at an even pace, for so long."""
        box = self._root.bounding_box()
        assert box is not None
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": HEIGHT}
        due = time.monotonic()
        for _ in range(round(seconds / PACE)):
            taken = self._page.screenshot(clip=clip)  # pyright: ignore[reportArgumentType]
            frame = Image.open(io.BytesIO(taken)).convert("RGB")
            size = (SHOWN, round(frame.height * SHOWN / frame.width))
            self.frames.append(frame.resize(size, Image.Resampling.LANCZOS))
            due += PACE
            self._page.wait_for_timeout(max(due - time.monotonic(), 0.0) * 1000)  # the pace itself


def play(notebook: Notebook) -> Film:
    """Train, switch a layer off, on and off again."""
    notebook.evaluate("app.shell.collapseLeft(); app.commands.execute('application:toggle-mode')")
    for index in (MODEL, INSPECTOR, notebook.append(LOOP), STEP):
        notebook.run(index, seconds=240)
    view = View(notebook.cell(INSPECTOR))
    notebook.start(notebook.append(TRAIN))
    view.wait("nni-progress", "found.dataset.state === 'running' && value > 0")
    view.select("block1/conv")
    view.perturb("Zero")  # compiled beforehand: the picture shows what a switch does
    view.part("nni-effect-loss-perturbed").wait_for()
    switch, marked = view.part("nni-switch"), view.root.get_by_test_id("nni-training-perturbed")
    switch.click()
    expect(marked).to_have_count(0)
    here = view.number("nni-progress")
    view.wait("nni-progress", "value > arg + 200", here)
    view.root.evaluate("root => root.scrollIntoView()")
    switch.hover()  # and over no row, which would show its tooltip
    film = Film(notebook, view)
    film.take(2.0)
    switch.click()
    film.take(3.0)
    switch.click()
    film.take(3.2)
    return film


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as root:
        shutil.copyfile(NOTEBOOK, pathlib.Path(root) / NOTEBOOK.name)
        with Lab(pathlib.Path(root)) as lab, lab.notebook(NOTEBOOK.name, width=WIDTH) as notebook:
            film = play(notebook)
    for number, frame in enumerate(film.frames) if folder else ():
        frame.save(folder / f"{number:02}.png")
    first, *rest = film.frames
    how = {"duration": round(PACE * 1000), "loop": 0, "quality": 50, "method": 6}
    first.save(PICTURE, save_all=True, append_images=rest, minimize_size=True, **how)
    assert PICTURE.stat().st_size < LARGEST, PICTURE.stat().st_size


if __name__ == "__main__":
    main()

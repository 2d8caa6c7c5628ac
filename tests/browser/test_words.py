"""The panel "Words" in a real JupyterLab shows hostile text as text, and explains bad inputs."""

from __future__ import annotations

import re

import pytest
from browser.axe import violations
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

HOSTILE = (
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "</bdi></div><b>bold</b>", "&amp;",
    "&lt;b&gt;", "<!--", "-->", "]]>", "<style>*{display:none}</style>", "<svg onload=alert(1)>",
    '"><a href=javascript:alert(1)>', "' onclick='alert(1)", "${alert(1)}", "{{7*7}}", "`id`",
    " the", "  ", "\n", "\t", "\r\n", "", "\u00a0", "\u200b", "\x00", "\x1b[31m", "שלום", "مرحبا",
    "\u202eabc", "👩‍👩‍👧", "e\u0301" * 40, "x" * 120, "\ufffd", "<|endoftext|>",
)  # fmt: skip

MODEL = f"""
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import nnx_inspector as nni

WORDS = {HOSTILE!r}

class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(WORDS), 8, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Linear(8, len(WORDS), rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.attn(self.embed(tokens)))

model = Model(nnx.Rngs(0))
ids = np.stack([np.arange(len(WORDS)), np.arange(len(WORDS))[::-1]])
insp = nni.Inspector(model, ids, decode=WORDS)
insp.selected = "embed"

def logits(off=()):  # in plain NumPy, without some heads
    attn, f64 = model.attn, lambda x: np.asarray(x[...], np.float64)
    at = lambda one, how, x: np.einsum(how, x, f64(one.kernel)) + f64(one.bias)
    x = f64(model.embed.embedding)[ids]
    q, k, v = (at(one, "btd,dhe->bthe", x) for one in (attn.query, attn.key, attn.value))
    weights = np.exp(np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    weights[:, list(off)] = 0
    mixed = at(attn.out, "bqhe,hed->bqd", np.einsum("bhqk,bkhe->bqhe", weights, v))
    return at(model.head, "bqd,dw->bqw", mixed)
"""


def test_hostile_words_are_text(sheet: Sheet):
    with sheet([MODEL]) as notebook:
        notebook.run(0, seconds=120)
        view = View(notebook.cell(0))
        view.wait_selected("embed")
        view.tab("words")
        strip = view.part("nni-words")
        words = strip.locator(".nni-word")
        expect(words).to_have_count(len(HOSTILE))
        given = words.evaluate_all("all => all.map(one => one.getAttribute('data-value'))")
        assert given == list(HOSTILE)
        # each is one text node, without an element in it, and nothing but words is in the strip
        inside = words.evaluate_all(
            "all => all.map(one => [...one.childNodes].map(n => n.nodeType))"
        )
        assert inside == [[3]] * len(HOSTILE)
        names = strip.locator("*").evaluate_all(
            "all => [...new Set(all.map(one => one.localName))]"
        )
        assert sorted(names) == ["bdi", "br"]
        texts = words.evaluate_all("all => all.map(one => one.textContent)")
        plain = [
            i for i, word in enumerate(HOSTILE) if word.isprintable() and word.split() == [word]
        ]
        assert [texts[i] for i in plain] == [HOSTILE[i] for i in plain]
        assert [texts[HOSTILE.index(word)] for word in (" the", "\n", "", "\t")] == [
            "·the", "⏎", "∅", "⇥",
        ]  # fmt: skip

        # the figures of the word under the keys are those of Python
        strip.focus()
        notebook.page.keyboard.press("Home")
        notebook.page.keyboard.press("ArrowRight")
        told = view.part("nni-word-pointed")
        expect(told).to_have_attribute("data-value", "1")
        norm = notebook.ask("float(insp.words('embed').norm[1])")
        expect(told).to_contain_text(f"norm {norm:#.4g}"[:9])
        view.part("nni-example-1").click()
        expect(words.first).to_have_attribute("data-value", HOSTILE[-1])
        expect(view.part("nni-words-python")).to_have_attribute(
            "data-value", 'insp.words("embed", 1)'
        )
        for dark in (False, True):
            notebook.theme(dark=dark)
            expect(words.first).to_have_attribute("style", re.compile("background"))
            assert violations(notebook.page, view.root) == []

        # an attribution in one click: its figures are those of Python
        view.tab("attribution")
        view.part("nni-study-start").click()
        expect(view.part("nni-study")).to_have_attribute("data-state", "done", timeout=60_000)
        view.part("nni-words").focus()
        notebook.page.keyboard.press("Home")
        score = notebook.ask("float(insp.attribute().scores[1, 0])")
        close = "Math.abs(value - arg) <= 1e-5 * Math.abs(arg)"
        view.wait("nni-attribution-pointed", close, score)
        view.tab("lens")
        view.part("nni-study-start").click()
        expect(view.part("nni-study-problem")).to_contain_text("No block that repeats")

        # a saved page has the words, and the figures that were on screen
        path = sheet.root / "words.html"
        assert notebook.ask(f"insp.to_html({str(path)!r})") > 0
        browser = notebook.page.context.browser
        assert browser is not None
        page = browser.new_page()
        page.goto(path.as_uri())
        saved = View(page.locator("body"))
        saved.tab("words")
        saved.part("nni-example-1").click()
        words = saved.part("nni-words").locator(".nni-word")
        expect(words.first).to_have_attribute("data-value", HOSTILE[-1])
        expect(words.first).to_have_attribute("style", re.compile("background"))
        page.close()

        # an attention is found by itself: its keys, largest first, are those of Python
        view.row("attn").click()
        view.tab("attention")
        view.part("nni-picture").focus()
        looks = view.part("nni-attention-keys")
        notebook.page.keyboard.press("ArrowDown")
        notebook.page.keyboard.press("ArrowDown")
        notebook.page.keyboard.press("PageDown")
        expect(looks).to_contain_text("head 1: ")
        expect(looks).to_contain_text("(query 1)")
        keys = notebook.ask(
            "np.argsort(-insp.values('attn@attention')[1, 1, 1], stable=True)[:6].tolist()"
        )
        shown = view.root.get_by_test_id("nni-attention-key").all()
        assert [int(one.get_attribute("data-value") or -1) for one in shown] == keys
        expect(view.part("nni-values-expression")).to_have_attribute(
            "data-value", 'insp.values("attn@attention")[1]'
        )

        # a head left out by clicks: the change of the output is that of plain NumPy
        view.open("nni-site-menu")
        view.part("nni-operations").click()
        view.select("attn@attention")
        view.tab("units")
        view.part("nni-edit-mask").click()
        view.switch_unit(1)
        norm = "np.linalg.norm"
        change = notebook.ask(f"{norm}(logits([1]) - logits()) / {norm}(logits())")
        view.wait("nni-output-change", "Math.abs(value - arg) <= 1e-4 * arg", change)


BAD = """
def raises(ids):
    return 1 / 0

class Off(nnx.Module):
    def __call__(self, x):
        return 0 * x

class Picture(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.off = nnx.Conv(3, 4, (3, 3), rngs=rngs), Off()

    def __call__(self, x):
        return self.off(self.conv(x)).mean((1, 2))

few = Model(nnx.Rngs(0))
"""
SAID = {
    "raises": "Decode raised ZeroDivisionError (division by zero) for the id 0",
    "lambda ids: b'x'": "Decode returned bytes, not text, for the id 0",
    "lambda ids: ['x', 'y']": "Decode returned 2 texts for the id 0",
    "WORDS[:3]": "Decode has no text for the id 3 (3 entries)",
}


def test_what_cannot_be_read_is_said_in_its_panel_and_the_rest_goes_on(sheet: Sheet):
    cells = [MODEL + BAD]
    for decode in SAID:
        cells.append(f"inspector = nni.Inspector(few, ids, decode={decode})")
    cells.append(
        "x = np.full((2, 9, 9, 3), 1e4, 'float32')\n"  # looks like a picture by its shape alone
        "inspector = nni.Inspector(Picture(nnx.Rngs(0)), x, labels=list('abcd'))\n"
        "inspector.selected = 'off'"
    )
    with sheet(cells) as notebook:
        notebook.run(0, seconds=120)
        for number, said in enumerate(SAID.values(), start=1):
            notebook.run(number)
            view = View(notebook.cell(number))
            view.select("embed")
            view.tab("words")
            why = f"{said}, so ids without a text are shown as numbers."
            expect(view.part("nni-inputs-problem")).to_have_text(why)
            words = view.part("nni-words").locator(".nni-word")
            expect(words.nth(9)).to_have_attribute("data-value", "9")
            expect(words.first).to_have_attribute("style", re.compile("background"))
        notebook.run(len(SAID) + 1)
        view = View(notebook.cell(len(SAID) + 1))
        view.wait_selected("off")
        done = {"examples": "done", "attribution": "done", "sweep": "done"}
        for panel, state in done.items():
            view.tab(panel)
            view.part("nni-study-start").click()
            status = view.part("nni-sweep" if panel == "sweep" else "nni-study")
            expect(status).to_have_attribute("data-state", state)
            if panel == "examples":
                expect(view.part("nni-examples-constant")).to_contain_text("one value, 0,")
            elif panel == "sweep":
                expect(view.part("nni-sweep-row").first).to_contain_text("not finite")
            else:  # of a model that reads pictures
                expect(view.root.get_by_test_id("nni-tab-lens")).to_have_count(0)
        view.tab("values")
        expect(view.part("nni-picture")).to_be_visible()
        expect(view.part("nni-values-thumbnail")).to_have_count(0)

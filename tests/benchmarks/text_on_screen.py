"""A long text and an attention of many heads in a real Chromium: from the click to what is painted,
and the frames while one scrolls, by the page's own clock, without a kernel.

    python -m tests.benchmarks.text_on_screen [--tokens 2000] [--heads 32] [--tries 15] [--scroll 2]

Prints a table. An empty page that is scrolled in the same way shows what the machine gives.
"""

from __future__ import annotations

import argparse
import pathlib

from nnx_inspector.screen import protocol
from tests.benchmarks.widget_page import PAGE, messages, open_page, print_table, site

SCRIPT = pathlib.Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
SITE = "blocks/0/attention"


def headers(tokens: int, heads: int) -> dict[str, object]:
    """The headers that the kernel sends; those that answer a request lack what it asked for."""
    shape = (1, heads, tokens, tokens)
    sites = [
        site("", -1, 0, "Net"),
        site("blocks/0", 0, 1, "Block"),
        site(SITE, 1, 2, "MultiHeadAttention"),
    ]
    words = [
        ["\n" if k % 40 == 39 else " theoretical"[: 2 + 7 * k % 11] for k in range(tokens)]
    ] * 2
    examples = tuple(
        protocol.Example(words=(f"#{i}", *texts[1:]), label="", prediction="")
        for i, texts in enumerate(words)
    )
    inputs = protocol.Inputs(
        batch=2, tokens="tokens", positions=tokens, examples=examples, problem=""
    )
    positions = protocol.Positions(
        id=0, site=SITE, example=0, unit=0, axis=None, along=1, axes=("", "position", "feature"),
        units=64, positions=tokens, figures=("norm", "unit"), source="The example.",
    )  # fmt: skip
    held = protocol.HeldArray(
        number=1, call=0, name="", shape=shape, dtype="float32",
        axes=("batch", "head", "query", "key"), bytes=4 * heads * tokens**2,
    )  # fmt: skip
    arrays = protocol.Arrays(
        request=0, site=SITE, part="attention", clean=False, parts=("output", "input", "attention"),
        arrays=(held,), perturbed=False, source="The example.", notes=(),
    )  # fmt: skip
    values = protocol.Values(
        request=0, array=1, index=(), axes=(), norm_over=-1, component="value", exact=False,
        starts=(), ends=(), block=(), counts=(), planes=("mean", "low", "high"), encoding="float32",
    )  # fmt: skip
    named = {"inputs": inputs, "positions": positions, "arrays": arrays, "values": values}
    extra = {name: protocol.to_header(message) for name, message in named.items()}
    return {**messages(sites, SITE), **extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tries", type=int, default=15)
    parser.add_argument("--scroll", type=float, default=2.0, help="seconds of scrolling")
    options = parser.parse_args()
    with open_page() as page:
        page.goto(PAGE)
        given = {"tries": options.tries, "scroll": options.scroll}
        times = page.evaluate(SCRIPT, {**headers(options.tokens, options.heads), **given})
    print(f"{options.tokens} tokens, {options.heads} heads: least, median, 95th percentile, in ms")
    print_table(times)


if __name__ == "__main__":
    main()

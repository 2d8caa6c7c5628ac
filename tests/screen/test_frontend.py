"""The built front end: its required and its forbidden content."""

import pathlib
import re

import nnx_inspector

ROOT = pathlib.Path(__file__).parents[2]
STATIC = pathlib.Path(nnx_inspector.__file__).parent / "static"


def test_it_is_built_and_small():
    import gzip

    script, style = ((STATIC / name).read_bytes() for name in ("widget.js", "widget.css"))
    assert len(gzip.compress(script)) + len(gzip.compress(style)) < 115_000
    assert len(style) > 1000


def test_the_script_of_a_page_can_stand_in_one():
    text = (STATIC / "page.js").read_text().lower()
    assert len(text) < 400_000
    assert not re.search(r"</script|<!--|<script|https?://(?!www\.w3\.org)", text)


def test_it_asks_no_other_machine_for_anything():
    text = (STATIC / "widget.js").read_text() + (STATIC / "widget.css").read_text()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert {a for a in addresses if "www.w3.org" not in a} == set()


def test_no_lock_file_names_a_registry():
    text = (ROOT / "js" / "package-lock.json").read_text()
    assert "resolved" not in text
    assert "http" not in re.sub(r'"url": "https?://[^"]*"', "", text)


def test_the_licences_of_what_is_bundled_lie_beside_it():
    text = (STATIC / "licenses.txt").read_text()
    for package in ("preact 1", "@preact/signals 2", "@dagrejs/dagre 3"):
        assert package in text
    assert text.count("Permission is hereby granted, free of charge") >= 4

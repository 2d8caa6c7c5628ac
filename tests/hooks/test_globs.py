"""Globs, against the regular expression that says what each means."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from nnx_inspector.hooks import globs
from nnx_inspector.hooks.globs import escape, escaped_glob, glob_matches, split_escaped
from nnx_inspector.records.capture import capture


def test_a_split_escape_keeps_the_separator_that_a_backslash_escapes():
    assert split_escaped(r"a\/b/c", "/") == [r"a\/b", "c"]


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("", (), True),
        ("", ("a",), False),
        ("*", ("a",), True),
        ("*", (), False),
        ("*", ("a", "b"), False),
        ("**", (), True),
        ("**", ("a", "b", "c"), True),
        ("blocks/*/attn", ("blocks", 3, "attn"), True),
        ("blocks/*/attn", ("blocks", 3, "mlp"), False),
        ("blocks/**", ("blocks",), True),
        ("**/attn", ("attn",), True),
        ("**/attn", ("blocks", 0, "attn"), True),
        ("a/**/d", ("a", "b", "c", "d"), True),
        ("a/**/d", ("a", "b", "c"), False),
        ("bl*s/0", ("blocks", 0), True),
        ("b?d", ("bad",), True),
        ("b?d", ("bd",), False),
        (r"a\/b", ("a/b",), True),
        ("a/b", ("a/b",), False),
        (r"c\[0]", ("c[0]",), True),
        ("a.c", ("abc",), False),
    ],
)
def test_globs(glob, path, expected):
    assert glob_matches(glob, path) is expected


def meaning_of(glob: str) -> str:
    """The regular expression of a glob: clear, and exponential in it."""
    parts = split_escaped(glob, "/") if glob else []
    return "".join("(.*/)?" if part == "**" else f"{_segment(part)}/" for part in parts)


def _segment(glob: str) -> str:
    wild = {"*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\\.|.", glob, re.DOTALL)
    return "".join(wild.get(p) or re.escape(p[-1] if p[1:] in ("*", "?") else p) for p in pieces)


@given(
    st.lists(
        st.sampled_from(["**", "*", "?", "a", "b", "a*", "*a*b", "**a", "[ab]", "\\*"]), max_size=6
    ),
    st.lists(st.sampled_from(["a", "b", "ab", "aab", "[ab]", "*", ""]), max_size=6),
)
def test_a_glob_matches_what_its_regular_expression_does(parts, path):
    glob, text = "/".join(parts), "".join(f"{escape(segment)}/" for segment in path)
    assert glob_matches(glob, path) is (re.fullmatch(meaning_of(glob), text) is not None)


@given(st.lists(st.text(alphabet="ab*?[]\\/:@", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_glob_of_a_key_matches_its_path_alone(path):
    glob = escaped_glob("/".join(map(escape, path)))
    assert glob_matches(glob, path)
    assert not glob_matches(glob, [*path[:-1], path[-1] + "a"])
    assert not glob_matches(glob, [*path, "a"])


class Deep(nnx.Module):
    def __init__(self, depth: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.inner = Deep(depth - 1, rngs) if depth else None

    def __call__(self, x):
        x = self.linear(x)
        return x if self.inner is None else self.inner(x)


@pytest.mark.parametrize("glob", ["**/**/**/**/x", "**/" * 6 + "x", "**/*/" * 10 + "x"])
def test_a_selection_of_a_deep_model_does_not_backtrack(glob, monkeypatch):
    compared = []
    real = globs.segment_matches
    monkeypatch.setattr(globs, "segment_matches", lambda *a: compared.append(a) or real(*a))
    assert not glob_matches(glob, ["inner"] * 30)
    assert len(compared) <= 30 * (glob.count("/") + 1)
    with pytest.raises(ValueError, match=r"matches no site"):
        capture(Deep(30, nnx.Rngs(0)), only=glob)(jnp.ones((1, 4)))


def test_stars_within_a_segment_do_not_backtrack():
    """A regular expression with `.*` would not come back from this one."""
    assert not glob_matches("*a" * 30 + "b", ["a" * 60])
    assert glob_matches("*a" * 30 + "*", ["a" * 60])


def test_the_module_of_a_deep_model_is_selected_by_several_stars():
    record = capture(Deep(3, nnx.Rngs(0)), only="**/inner/**/linear")(jnp.ones((1, 4)))[1]
    assert list(record) == [
        "inner/linear",
        "inner/inner/linear",
        "inner/inner/inner/linear",
    ]

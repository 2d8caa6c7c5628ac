"""The source around a call: the right lines, the function, and only existing files."""

import linecache

from flax import nnx

from nnx_inspector.screen.source import (
    LONGEST_LINE,
    LONGEST_TEXT,
    documentation_of,
    excerpt_of,
    excerpts_of,
)

TEXT = """import x
class Block:
    def __call__(self, x):
        def inner(y):
            return self.up(y)
        return inner(x)

    async def other(self):
        return 1
""" + "".join(f"# {i}\n" for i in range(20))


def written(tmp_path, text=TEXT):
    file = tmp_path / "folder" / "model.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_the_lines_around_a_call_with_its_function(tmp_path):
    one = excerpt_of(f"{written(tmp_path)}:5")
    assert (one.file, one.function) == ("folder/model.py", "Block.__call__.inner")
    assert (one.first, one.line) == (1, 5)
    assert one.text.split("\n") == TEXT.split("\n")[:10]
    assert one.text.split("\n")[one.line - one.first] == "            return self.up(y)"
    assert excerpt_of(f"{written(tmp_path)}:9").function == "Block.other"
    assert excerpt_of(f"{written(tmp_path)}:1").function == ""


def test_a_file_that_was_edited_is_read_anew(tmp_path):
    file = written(tmp_path)
    assert "inner" in excerpt_of(f"{file}:5").text
    file.write_text("a = 1\nb = 2\n")
    assert excerpt_of(f"{file}:2").text == "a = 1\nb = 2"
    assert excerpt_of(f"{file}:5") is None, "that line does not exist"


def test_what_cannot_be_read_is_left_out(tmp_path):
    file = written(tmp_path)
    assert excerpts_of(["", "no line", "<string>:3", f"{tmp_path}/none.py:1"]) == ()
    places = [f"{file}:{line}" for line in (3, 3, 4, 5, 6, 8)]
    assert [one.line for one in excerpts_of(places)] == [3, 4, 5, 6]


def test_text_that_is_no_python_has_no_function_and_long_lines_are_cut(tmp_path):
    one = excerpt_of(f"{written(tmp_path, '%magic' + 'x' * 999)}:1")
    assert one.function == ""
    assert one.text == "%magic" + "x" * (LONGEST_LINE - 6) + " …"


def test_a_notebook_cell_is_read_from_the_cache_of_lines():
    name = "<ipython-input-1-abc>"
    linecache.cache[name] = (len(TEXT), None, TEXT.splitlines(keepends=True), name)
    one = excerpt_of(f"{name}:4")
    assert (one.file, one.function, one.line) == ("notebook cell", "Block.__call__.inner", 4)


def test_documentation_is_the_types_own_or_the_nearest_of_the_users():
    class Told(nnx.Module):
        __doc__ = "What it is.\n\n            Indented.\n        Not indented.\n        "

    class Inherits(Told):
        pass

    class Silent(nnx.Module):
        pass

    text = "What it is.\n\n    Indented.\nNot indented."
    assert documentation_of(Told) == documentation_of(Inherits) == text
    assert documentation_of(Silent) == "", "what every module is tells nothing"
    assert documentation_of(nnx.Linear).startswith("A linear transformation")
    Told.__doc__ = "x" * 10_000
    assert len(documentation_of(Told)) == LONGEST_TEXT + 2
    Told.__doc__ = 3
    assert documentation_of(Told) == ""

"""The examined batch in readable form: words, pictures, and the names of classes.

Invariants: a user's function that fails, or a batch that does not fit, makes a sentence in
`problem` and never an exception; no text is shown for an id that it does not belong to. Fetches
and draws nothing itself, and knows no jax and no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.arrays import is_array
from nnx_inspector.errors import add_note
from nnx_inspector.screen import protocol
from nnx_inspector.screen.pictures import Argument, may_be_pictures, pictures_in
from nnx_inspector.typing import Int, Value

Decode = Callable[[Any], object] | Sequence[str] | Mapping[int, str]
Names = Sequence[str] | Mapping[int, str]

MOST_EXAMPLES = 64
"""The most examples of a batch in a message."""
MOST_WORDS = 1 << 14
"""The most words of all examples in a message; the first example has at most as many."""
MOST_CACHED = 1 << 20
"""The most ids whose texts are kept."""
_FORMS: Sequence[Callable[[int], object]] = (lambda i: i, lambda i: [i], lambda i: np.array([i]))
"""What a function may take: an id, a list of ids, or an array of them."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchReader:
    """What the user said about how to read a batch; see `Inspector`.

    Attributes:
        decode: a function of ids, or the text of each id.
        tokens: the argument with the ids: a position, a name or a path; None to find it.
        labels: the names of the classes.
        images: the argument with the pictures, in the same form; False for none.
    """

    decode: Decode | None = None
    tokens: str | int | None = None
    labels: Names | None = None
    images: str | int | None = None
    _texts: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    _failed: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    _form: list[Callable[[int], object]] = dataclasses.field(
        default_factory=list[Callable[[int], object]]
    )

    @property
    def given(self) -> bool:
        """Whether the user said anything."""
        return self.decode is not None or self.labels is not None or self._has_images_option

    def has_any(self, arrays: Sequence[object]) -> bool:
        """Whether a batch may have anything to show: the user said so, or there may be pictures."""
        return self.given or (self.images is None and any(map(may_be_pictures, arrays)))

    @property
    def _has_images_option(self) -> bool:
        """Whether the user said which argument has the pictures."""
        return self.images is not None and self.images is not False

    # ------------------------------------------------------------------ texts

    def text(self, ids: object) -> list[str]:
        """The text of each of some ids, an array of any shape, flattened; digits for an id without
        a text.
        """
        return [self._text(int(i)) for i in np.asarray(ids).reshape(-1)]

    def name(self, number: int) -> str:
        """The name of a class; its number if it has none."""
        found = None if self.labels is None else _table_entry(self.labels, number)
        return str(number) if found is None else _short(str(found))

    def _text(self, number: int) -> str:
        if self.decode is None:
            return str(number)
        if number not in self._texts:
            if len(self._texts) >= MOST_CACHED:
                self._texts.clear()
            self._texts[number] = _short(self._decoded(number))
        return self._texts[number]

    def _decoded(self, number: int) -> str:
        if number < 0:  # an index from the end would be the text of another id
            self._note_failure("negative", f"the id {number} is negative")
            return str(number)
        if not callable(self.decode):
            found = None if self.decode is None else _table_entry(self.decode, number)
            if isinstance(found, str):
                return found
            size = 0 if self.decode is None else len(self.decode)
            what = "no text" if found is None else f"{type(found).__name__}, not text,"
            self._note_failure("table", f"decode has {what} for the id {number} ({size:,} entries)")
            return str(number)
        why = ""
        for form in self._form or _FORMS:
            try:
                text = _one_text(self.decode(form(number)))
            except Exception as error:  # noqa: BLE001 - a function of the user, reported below
                why = why or f"raised {type(error).__name__} ({_short(str(error))})"
                continue
            if isinstance(text, str):
                if not self._form:
                    self._form.append(form)
                return text
            why = f"returned {text.__class__.__name__}, not text,"
            if isinstance(text, (list, tuple)):
                why = f"returned {len(text)} texts"
        self._note_failure("function", f"decode {why} for the id {number}")
        return str(number)

    def _note_failure(self, what: str, why: str) -> None:
        self._failed.setdefault(what, f"{why}, so ids without a text are shown as numbers.")

    # ---------------------------------------------------------------- a batch

    def message(self, arguments: Sequence[Argument]) -> protocol.Inputs:
        """The message for a batch: the arrays among the arguments of a pass."""
        found, problem = self.tokens_in(arguments) if self.decode is not None else (None, "")
        ids = np.zeros((0, 0), np.int32) if found is None else _id_rows(found)
        pictures, no_picture = self.pictures_in(arguments)
        first = [one for one in arguments if pictures and one.path == pictures.path] or arguments
        lengths = (int(one.value.shape[0]) for one in first if len(one.value.shape))
        batch = len(ids) if found is not None else next(lengths, 0)
        positions = ids.shape[1]
        most = min(batch, MOST_EXAMPLES, max(1, MOST_WORDS // max(1, positions)))
        words = [tuple(self.text(row[:MOST_WORDS])) for row in ids[:most]] or [()] * most
        label = self._labels_in(arguments, found, batch)
        examples = tuple(
            protocol.Example(
                words=words[i],
                label="" if label is None else self.name(int(label[i])),
                prediction="",
            )
            for i in range(most)
        )
        failed = (text[:1].upper() + text[1:] for text in self._failed.values())
        return protocol.Inputs(
            batch=batch,
            tokens="" if found is None else found.path,
            positions=positions,
            examples=() if found is None and label is None else examples,
            problem=" ".join(filter(None, [problem, no_picture, *failed])),
            pictures=pictures,
        )

    def with_predictions(self, batch: protocol.Inputs, outputs: Sequence[Value]) -> protocol.Inputs:
        """The message with what a pass predicts, from the arrays that it returned."""
        said = self._predicted_classes(outputs, batch.batch)
        if said is None:
            return batch
        blank = protocol.Example(words=(), label="", prediction="")
        examples = batch.examples or (blank,) * min(batch.batch, MOST_EXAMPLES)
        names = ["" if said[i] < 0 else self.name(int(said[i])) for i in range(len(examples))]
        shown = [
            dataclasses.replace(one, prediction=name)
            for one, name in zip(examples, names, strict=True)
        ]
        return dataclasses.replace(batch, examples=tuple(shown))

    def words(self, arguments: Sequence[Argument], example: int) -> list[str]:
        """The words of one example; [] if no argument holds ids."""
        found, _ = self.tokens_in(arguments)
        return [] if found is None else self.text(_id_rows(found)[example])

    def pictures_in(self, arguments: Sequence[Argument]) -> tuple[protocol.Pictures | None, str]:
        """The pictures of a batch, or None, and a sentence if the user named an argument without
        any.
        """
        if self.images is False:
            return None, ""
        named = f"images={self.images!r}" if self._has_images_option else ""
        able = [one for one in arguments if self.images is None or _is_named(one, self.images)]
        return pictures_in(able, named=named, most=MOST_EXAMPLES)

    def tokens_in(self, arguments: Sequence[Argument]) -> tuple[Argument | None, str]:
        """The argument that holds the ids, or None and a sentence that says why."""
        if self.tokens is not None:
            named = [one for one in arguments if _is_named(one, self.tokens)]
            fit = [one for one in named if _holds_ids(one.value)]
            if len(fit) == 1:
                return fit[0], ""
            if named and not fit:
                shape = f"{named[0].value.dtype}{list(named[0].value.shape)}"
                return None, f"tokens={self.tokens!r} is {shape}, which holds no ids of tokens."
            if fit:
                return None, f"tokens={self.tokens!r} names {len(fit)} arrays: {_names(fit)}."
            has = f"It has {_names(arguments)}." if arguments else "It has no array."
            return None, f"This pass has no argument tokens={self.tokens!r}. {has}"
        able = [one for one in arguments if _holds_ids(one.value) and one.embedded is not False]
        able = [one for one in able if one.embedded] or able
        if isinstance(self.decode, Sequence):
            most = len(self.decode)
            able = [one for one in able if _are_below(one.value, most)] or able
        if len(able) == 1:
            return able[0], ""
        if able:
            return None, f"Several arguments may hold tokens: {_names(able)}. Choose with tokens=."
        return None, "No argument holds ids of tokens (integers with an axis of positions)."

    def _labels_in(
        self, arguments: Sequence[Argument], tokens: Argument | None, batch: int
    ) -> np.ndarray | None:
        """The classes of the examples, if one argument alone can hold them."""
        if self.labels is None:
            return None
        able = [
            one.value
            for one in arguments
            if one is not tokens
            and tuple(one.value.shape) == (batch,)
            and _is_whole(one.value)
            and _are_below(one.value, len(self.labels))
        ]
        return np.asarray(able[0]) if len(able) == 1 else None

    def _predicted_classes(
        self, outputs: Sequence[Value], batch: int
    ) -> Int[np.ndarray, " batch"] | None:
        """The class with the largest logit of each example, -1 where one is NaN."""
        if self.labels is None:
            return None
        shape = (batch, len(self.labels))
        able = [x for x in outputs if tuple(x.shape) == shape and not _is_whole(x)]
        if len(able) != 1:
            return None
        logits = np.asarray(able[0]).astype(np.float64)
        return np.where(np.isnan(logits).any(-1), -1, np.nan_to_num(logits).argmax(-1))


def reader_of(f: object, /, **given: object) -> tuple[BatchReader, dict[str, Any]]:
    """The inputs that keywords of an Inspector name, and the keywords that go to the call of `f`.

    Raises:
        TypeError: a keyword names nothing, and `f` does not take it either.
    """
    given, said = {k: _as_list(x) for k, x in given.items() if x is not None}, dict[str, Any]()
    decode, labels, tokens, images = map(given.get, ("decode", "labels", "tokens", "images"))
    if callable(decode) or _is_table(decode):
        said["decode"] = decode
        if isinstance(tokens, (str, int)) and not isinstance(tokens, bool):
            said["tokens"] = tokens
    if _is_table(labels) and not isinstance(labels, str):
        said["labels"] = labels
    if isinstance(images, str) or (isinstance(images, int) and images is not True):
        said["images"] = False if images == "none" else images
    others = {k: x for k, x in given.items() if k not in said}
    for name, value in others.items():
        if not _accepts_keyword(f, name):
            raise TypeError(
                f"{_why_no_option(name, value)} The call that is inspected has no argument of "
                f"this name either: leave it out, or pass {_USAGE[name]}."
            )
    return BatchReader(**said), others


@contextlib.contextmanager
def noting_passed_on(others: Mapping[str, object]) -> Iterator[None]:
    """Inside, an error of a call that names one of these keywords says that it was passed on."""
    try:
        yield
    except TypeError as error:
        for name, value in others.items():
            if repr(name) in str(error):
                add_note(
                    error,
                    f"{_why_no_option(name, value)} So it went to the model. If it is not meant "
                    f"for the model, pass {_USAGE[name]}.",
                )
        raise


def _why_no_option(name: str, value: Value) -> str:
    found = f"{type(value).__name__} {_short(repr(value))}"
    found = f"{value.dtype}{list(value.shape)}" if is_array(value) else found
    return f"{name}= takes {_ACCEPTED[name]}; it is {found}."


_ACCEPTED = {
    "decode": "a function of ids, or the texts of all ids",
    "tokens": "the position, name or path of the argument that holds the ids, and needs decode=",
    "images": "the position, name or path of the argument that holds the pictures, or False",
    "labels": "a sequence of the names of the classes, or a mapping from their numbers",
}
_USAGE = {
    "decode": "decode=tokenizer.decode",
    "tokens": "decode=tokenizer.decode too, and tokens=0 for the first argument",
    "images": "images=0 for the first argument",
    "labels": 'labels=["cat", "dog"]',
}


def _accepts_keyword(f: Any, name: str) -> bool:
    """Whether a call takes a keyword, as far as it tells."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # no signature, or no call: other errors tell
        return True
    found, every = parameters.get(name), inspect.Parameter.VAR_KEYWORD
    return (found is not None and found.kind is not found.POSITIONAL_ONLY) or any(
        one.kind is every for one in parameters.values()
    )


def _as_list(given: object) -> object:
    """An array of texts as a list; anything else as it is."""
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "UT":
        return given.tolist()
    return given


def _is_table(given: object) -> bool:
    return isinstance(given, (Sequence, Mapping)) and not isinstance(given, bytes)


def _table_entry(table: Names, number: int) -> str | None:
    """The entry of a number; None if there is none. A negative number is no id."""
    if isinstance(table, Mapping):
        return table.get(number)
    return table[number] if 0 <= number < len(table) else None


def _one_text(found: object) -> object:
    """The text that a function returned for one id, perhaps as the only one of a sequence."""
    if isinstance(found, (str, bytes)):
        return found
    items = found.tolist() if isinstance(found, np.ndarray) else found
    if isinstance(items, (list, tuple)) and len(items) == 1:
        return items[0]
    return items


def _short(text: str) -> str:
    return text if len(text) <= protocol.LONGEST_TEXT else text[: protocol.LONGEST_TEXT] + "…"


def _id_rows(ids: Argument) -> Int[np.ndarray, "batch position"]:
    """Ids with an axis of examples: a single row is one example."""
    return np.atleast_2d(np.asarray(ids.value))


def _names(arguments: Sequence[Argument]) -> str:
    return ", ".join(repr(one.path) for one in arguments[:6])


def _is_named(one: Argument, name: str | int) -> bool:
    if isinstance(name, int):
        return one.place == name
    return one.path == name or one.path.endswith(f"/{name}") or one.path.split("/")[0] == name


def _is_whole(x: Value) -> bool:
    return np.dtype(x.dtype).kind in "iu"


def _holds_ids(x: Value) -> bool:
    return _is_whole(x) and len(x.shape) in (1, 2) and 0 not in x.shape


def _are_below(x: object, most: int) -> bool:
    values = np.asarray(x)
    return bool(values.size) and int(values.min()) >= 0 and int(values.max()) < most

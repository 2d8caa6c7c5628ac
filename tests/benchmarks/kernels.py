"""How many kernels a compiled program launches, read off XLA's own text of it."""

from __future__ import annotations

import re

FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
    ),
    *("while", "conditional", "optimization-barrier", "add-dependency", "opt-barrier"),
}
"""What launches nothing itself; the bodies of loops and conditions count by themselves."""
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(")
_INNER = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)|called_computations=\{([^}]*)\}")


def kernels(text: str) -> int:
    """The instructions of an optimised module that launch, each counted once.

    The body of a loop counts once, however often it runs; what is inside a fusion, a reduction or
    a call is one kernel.

    Args:
        text: the text of a compiled program, `compiled.as_text()`.
    """
    inner = {
        name.strip(" %")
        for one, several in _INNER.findall(text)
        for name in [one, *several.split(",")]
    }
    count, inside = 0, False
    for line in text.splitlines():
        if header := _HEADER.match(line):
            inside = header[1] in inner
        elif not inside and (found := _INSTRUCTION.match(line)):
            count += found[1] not in FREE and not found[1].endswith("-done")
    return count

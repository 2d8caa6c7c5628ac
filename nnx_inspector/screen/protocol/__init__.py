"""The messages between kernel and browser: their content and their shape, and nothing else.

Every message is a JSON header (a dataclass of one of these files, with its name in `type`) and at
most one binary buffer. Each name of these files is also a name of this module. The types are the
authority: `js/src/kernel/protocol.ts` and the golden messages are generated from them. Invariant:
headers are valid JSON (never NaN) and hold no arrays of numbers. Knows no jax, no widget and no
model.
"""

from typing import Final

from nnx_inspector.screen.protocol.comparison import *
from nnx_inspector.screen.protocol.constants import *
from nnx_inspector.screen.protocol.flow import *
from nnx_inspector.screen.protocol.headers import *
from nnx_inspector.screen.protocol.inputs import *
from nnx_inspector.screen.protocol.nnx import *
from nnx_inspector.screen.protocol.panels import *
from nnx_inspector.screen.protocol.requests import *
from nnx_inspector.screen.protocol.state import *
from nnx_inspector.screen.protocol.values import *

TO_KERNEL: Final = tuple(cls for cls in MESSAGES.values() if issubclass(cls, ToKernel))
TO_BROWSER: Final = tuple(cls for cls in MESSAGES.values() if not issubclass(cls, ToKernel))

"""A record's stacked sites, layer by layer, as the screen shows them.

Invariant: the layers of a site are parts of its own summary; nothing is counted in two layers.
Does not measure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnx_inspector.recordings.layers import Summaries, layer_key, one_of
from nnx_inspector.records.call import Call, named_summaries
from nnx_inspector.records.record import Record
from nnx_inspector.stats.summary import Summary


def layers_of(record: Record, stacks: Mapping[str, int]) -> Summaries:
    """For single layers of stacked sites their output, gradient and input, as far as measured.

    Args:
        record: of one pass, on the host.
        stacks: site -> how many of its layers, the first ones.
    """
    out: Summaries = {}
    for site, most in stacks.items():
        calls = record[site].calls if site in record else ()
        lengths = {np.shape(c.ran)[0] if c.loops and not c.leading else 0 for c in calls}
        length = lengths.pop() if len(lengths) == 1 else 0  # else some are in no layer
        found = {
            quantity: _measured(calls, quantity) for quantity in ("output", "gradient", "input")
        }
        for layer in range(min(most, length)):
            for quantity, summaries in found.items():
                rows = [s.row(layer) for ran, s in summaries if np.any(ran[layer])]
                # a cotangent that never reached a layer has left its row empty
                parts = [s for s in rows if quantity != "gradient" or np.any(s.bins)]
                if parts:
                    out.setdefault(layer_key(site, layer), {})[quantity] = one_of(parts)
    return out


def _measured(calls: tuple[Call, ...], quantity: str) -> list[tuple[np.ndarray, Summary]]:
    """How often the layers ran, and their summaries, for each array of each call."""
    return [
        (np.asarray(call.ran), summary)
        for call in calls
        for _, summary in named_summaries(getattr(call, quantity))
        if not summary.opaque
    ]

"""The stacked sites of a record, layer by layer, as the screen shows them.

Invariant: the layers of a site add up to its summary; no value is counted in two layers. Does not
measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnx_inspector.recordings.layers import Summaries, layer_key, one_of
from nnx_inspector.records.call import Call, named_summaries
from nnx_inspector.records.record import Record
from nnx_inspector.stats.summary import Summary


def layers_of(record: Record, stacks: Mapping[str, int]) -> Summaries:
    """The output, gradient and input of the first layers of stacked sites, if they were measured.

    `stacks` maps a site to how many of its layers to return.
    """
    out: Summaries = {}
    for site, most in stacks.items():
        calls = record[site].calls if site in record else ()
        lengths = {np.shape(c.ran)[0] if c.loops and not c.leading else 0 for c in calls}
        length = lengths.pop() if len(lengths) == 1 else 0  # else some calls belong to no layer
        found = {
            quantity: _measured(calls, quantity) for quantity in ("output", "gradient", "input")
        }
        for layer in range(min(most, length)):
            for quantity, summaries in found.items():
                rows = [s.row(layer) for ran, s in summaries if np.any(ran[layer])]
                # a layer that no cotangent reached has an empty row
                parts = [s for s in rows if quantity != "gradient" or np.any(s.bins)]
                if parts:
                    out.setdefault(layer_key(site, layer), {})[quantity] = one_of(parts)
    return out


def _measured(calls: tuple[Call, ...], quantity: str) -> list[tuple[np.ndarray, Summary]]:
    """For each array of each call, how often the layers ran and their summaries."""
    return [
        (np.asarray(call.ran), summary)
        for call in calls
        for _, summary in named_summaries(getattr(call, quantity))
        if not summary.opaque
    ]

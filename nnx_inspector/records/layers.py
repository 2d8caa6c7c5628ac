"""The stacked sites of a record, layer by layer, as the screen shows them.

Invariant: the layers of a site add up to its summary; no value is counted in two layers. Does not
measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnx_inspector.recordings.layers import Summaries, layer_key, one_of
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
        parts = [
            (np.asarray(call.ran), *part)
            for call in (calls if length else ())
            for part in call.parts(site)
        ]
        for layer in range(min(most, length)):
            found: dict[tuple[str, str], list[Summary]] = {}
            for ran, key, quantity, summary in parts:
                row = summary.row(layer)
                # a layer that no cotangent reached has an empty row
                if np.any(ran[layer]) and (quantity != "gradient" or np.any(row.bins)):
                    found.setdefault((layer_key(key, layer), quantity), []).append(row)
            for (key, quantity), rows in found.items():
                out.setdefault(key, {})[quantity] = one_of(rows)
    return out

"""What a model knows on the way to its output: lenses, attribution, the examples of a unit.

Plain functions over one model that return frozen dataclasses with `to_frame`. Invariant: the model,
its RNG streams and its statistics stay as they are, and whatever a function chooses by itself is
named in its result. They run programs of their own, so none of them belongs in a traced function.
They draw nothing.
"""

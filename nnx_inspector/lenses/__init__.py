"""What a model says within: lenses, attribution to the input, the examples that excite a unit.

Plain functions over one model that return frozen dataclasses with `to_frame`. They promise that
the model, its RNG streams and its statistics stay as they are, and that what they choose by
themselves is named in the result. They run programs of their own, so none of them belongs in a
traced function. They draw nothing.
"""

"""Private parts of flax and jax, one function for each.

No other room imports `jax._src`, `flax.nnx.graphlib` or an undocumented attribute. Each function
has a test that fails clearly when a new version moves what it relies on. This room decides
nothing: it answers the same question in the same way on every supported version.
"""

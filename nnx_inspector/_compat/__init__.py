"""Access to private parts of flax, jax and ipykernel, with one function for each.

No other package here imports `jax._src`, `flax.nnx.graphlib` or an undocumented attribute. Each
function has a test that fails clearly if a new version moves what it relies on. This package makes
no decisions: a function gives the same answer on every supported version.
"""

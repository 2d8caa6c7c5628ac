"""Which program a jitted call of a watched loop runs.

`ownership` says which of its calls are the model's, `variants` chooses it, `recompile` compiles it
before it is needed, and `fast_path` leaves the choice to jax while nothing is measured. All of them
run the same step of the user.
"""

"""Rules for what the optimizer makes of gradients: its state, steps that it skips or a loop
does not keep, and a rate of 0.

They promise to claim of an optimizer only what the recorded state or updates show. They do not read
the optimizer itself, and nothing here imports jax.
"""

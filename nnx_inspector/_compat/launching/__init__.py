"""Where jax launches a program, and what runs instead.

`jitted` hears and changes jitted calls, `launch` all launches of a thread, and `batched` says which
examples of a vmap run what is inside a condition or a loop.
"""

"""Time, memory and arithmetic of a step, by module: measured by running it under jax's profiler.

Promises that parts add up to the whole, and that what belongs to no module has a row of its own. A
step runs on copies of its arguments. Does not change a model, and costs nothing until it is asked.
"""

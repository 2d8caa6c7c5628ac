"""The passes of a run: their history, their file, their comparison.

A recording is bounded in memory however long the run is, its file is written while the run goes,
and reading it starts neither jax nor flax. This room measures nothing and draws nothing but
figures.
"""

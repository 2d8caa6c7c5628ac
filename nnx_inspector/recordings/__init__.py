"""The passes of a run: their history, their file, their comparison.

A recording is bounded in memory however long the run is, its file is written during the run, and
reading it imports neither jax nor flax. This room measures nothing, and draws only the Plotly
figures of a recording.
"""

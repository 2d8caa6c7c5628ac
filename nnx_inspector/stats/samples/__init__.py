"""Samples of activations and parameters: what the findings need and no histogram tells.

For an activation, statistics of at most 64 of its units (`unit_stats`); for a parameter, some of
its elements and a checksum of all (`parameter_stats`). `sample_units` and `sample_parameters` take
them on the device.
"""

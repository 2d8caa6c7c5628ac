"""One array, reduced to a few figures.

The figures are counts, extremes, moments, a histogram with fixed edges, statistics of each unit,
and the samples that the findings need. They are computed where the array is, in the user's program
or on the host, and can be merged over calls, layers, steps and devices. This room knows neither
modules nor sites.
"""

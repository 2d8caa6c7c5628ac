"""One array, reduced to a few figures.

Counts, extremes, moments, a histogram with fixed edges, figures of each unit, and the gauges that
the findings need. Figures are computed where the array is, in the user's program or on the host,
and they add up over calls, layers, steps and devices. This room knows neither modules nor sites.
"""

"""The operations within one call of a module: `names` gives each its name, `gates` those of NNX's
recurrent cells, and `attention` finds the pattern of an attention, whoever computes it.
"""

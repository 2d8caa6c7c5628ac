"""The operations within one call of a module.

`names` names each one, `gates` knows the names of NNX's recurrent gates, and `attention` finds the
pattern of an attention, whatever computes it.
"""

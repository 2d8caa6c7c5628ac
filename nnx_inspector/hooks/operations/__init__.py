"""The operations within one call of a module.

`names` names each one, and `attention` finds the pattern of an attention, whatever computes it.
"""

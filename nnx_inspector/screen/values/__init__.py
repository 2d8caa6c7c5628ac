"""What the panel "Values" shows of an array: a window of it in blocks, as messages.

The arrays are NumPy's, or anywhere else: who has them says how a part of one is read.
"""

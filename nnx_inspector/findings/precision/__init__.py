"""What numbers of few bits cannot hold: ranges, the size of updates, and updates that are lost.

Promises: the dtype that a sentence names is the one that is there. Does not measure.
"""

"""The arrays of a site as they are looked at: opened, cut into blocks, read.

Whatever the size of an array, what leaves the device is bounded.
"""

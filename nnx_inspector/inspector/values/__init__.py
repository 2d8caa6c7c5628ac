"""The arrays of a site for viewing: opened, cut into blocks and read.

The data that leaves the device is bounded, whatever the size of an array.
"""

"""The arrays of a site for viewing: read, cut into blocks and named.

The data that leaves the device is bounded, whatever the size of an array.
"""

"""Watching a training loop that the user owns.

A measured step sends its summaries to the host in a few messages, and the steps between run the
bare program. A failure here is counted and shown; it never reaches the user's step.
"""

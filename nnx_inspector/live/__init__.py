"""Somebody else's loop.

A measured step tells its summaries to the host in few messages, and the steps between run the
bare program. Whatever fails here is counted and shown; it never reaches the user's step.
"""

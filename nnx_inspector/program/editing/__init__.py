"""Edits a traced program: bodies, the functions that are put in, and what will be seen.

Promises that a program computes what it computed before. Does not decide what is measured: a plan
does. `program.instrument` is the way in.
"""

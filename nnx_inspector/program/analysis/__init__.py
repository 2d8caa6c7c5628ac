"""What a traced call shows without being run.

This covers shapes in words, the calls and the dataflow between them, FLOPs and memory. If a number
is an estimate, its name or its docstring says so. Nothing here changes a program.
"""

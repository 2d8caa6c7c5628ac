"""What is read off a traced call without running it.

Shapes in words, the calls and the way of values between them, operations and memory. Where a
number is an estimate, its name or its docstring says so. Nothing here changes a program.
"""

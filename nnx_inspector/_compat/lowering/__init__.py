"""What XLA asks while it makes a program for several devices of one that jax has lowered.

It asks in the thread that compiles. Nothing here decides what is measured.
"""

"""What inspection costs: seconds and compilations.

This room times the steps of a loop, and lists what jax compiles and why. It changes no program.
"""

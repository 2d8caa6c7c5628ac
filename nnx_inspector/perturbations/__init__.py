"""Perturbations of values, gradients and parameters, and the measures of their effect.

A kind is a pytree: its numbers are data and its operation is code, so switching and tuning compile
nothing. The model is never changed. This package does not know the screen.
"""

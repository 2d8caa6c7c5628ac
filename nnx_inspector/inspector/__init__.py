"""One model on screen.

Ties tracing, passes, loops, perturbations and the screen together. Whatever goes wrong with the
screen, or with what the browser asks, is shown and never reaches the user's code.
"""

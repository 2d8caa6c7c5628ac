"""One model on screen.

This room ties tracing, passes, loops, perturbations and the screen together. Errors of the screen
and of the browser's requests are shown and never reach the user's code.
"""

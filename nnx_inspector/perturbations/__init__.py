"""What may be done to a value, a gradient or a parameter, and its effect.

A kind is a pytree: its numbers are data, what it does is code, so that switching and tuning
compile nothing. The model is never changed. This room does not know the screen.
"""

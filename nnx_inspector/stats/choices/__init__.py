"""Figures of softmaxes that choose: of each head of an attention, and of each expert of a router.

`rows` says what the figures are, and imports no jax; `measure` computes them on the device.
"""

"""How a signal passes through a model that was just made, forward and backward.

It promises the figures of `nni.value_and_grad` for each model that it makes, and says what healthy
is, with the source. It does not change a model; a training step that the user passes does.
"""

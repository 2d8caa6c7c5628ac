"""`capture` and `value_and_grad`: one pass of a model, returned as an ordinary output.

A record holds what each site received and returned and, if requested, gradients, parameters, values
and units. The call returns what the plain call returns.
"""

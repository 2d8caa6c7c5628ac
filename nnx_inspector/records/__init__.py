"""`capture` and `value_and_grad`: one pass as an ordinary output.

A record holds what each site received and returned, with gradients, parameters, values and units
where they were asked for. The results of the call are those of the plain call.
"""

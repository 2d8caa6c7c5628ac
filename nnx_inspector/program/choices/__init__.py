"""Softmaxes that choose, in a traced program: the attentions, and the routers of experts.

`marking` finds them and puts a mark beside each, which `program.instrument` takes out like any
other. Changes nothing else.
"""

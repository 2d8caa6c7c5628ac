"""Softmaxes that choose, in a traced program: the attentions, and the routers of experts.

`places` finds them and puts a mark beside each, which `program.rewrite` takes out like any other.
Changes nothing else.
"""

"""The traced call: one jaxpr with marks that name its values.

Staging a call, finding the marks in it, evaluating it again with summaries threaded through, and
what can be read off it without running it: shapes, dataflow, cost. What a mark names is the
user's value, unchanged. This room does not decide which sites are measured.
"""

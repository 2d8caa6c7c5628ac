"""The traced call: one jaxpr with marks that name its values.

Stages a call, finds the marks in it, evaluates it again with summaries threaded through, and reads
from it what is known without running it: shapes, dataflow, cost. A mark does not change the value
it names. This package does not decide which sites are measured.
"""

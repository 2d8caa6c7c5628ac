"""What is wrong with a model, worst first.

Rules judge a recording and a few facts of the traced program. They measure nothing themselves,
and they say nothing where the evidence is too thin.
"""

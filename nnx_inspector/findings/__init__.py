"""What is wrong with a model, worst first.

Rules judge a recording and a few facts about the traced program. They measure nothing themselves
and report nothing if the evidence is too thin.
"""

"""What is asked of a model beside its passes: lenses, attribution, the examples of a unit.

It runs the functions of `lenses` on a copy of the inspector's model and shows what they find. It
computes no figure itself.
"""

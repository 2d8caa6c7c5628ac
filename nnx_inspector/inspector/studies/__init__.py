"""Studies of a model beside its passes: lenses, attribution, the examples of a unit.

They run the functions of `lenses` on a copy of the inspector's model and show the results. This
room computes no figure itself.
"""

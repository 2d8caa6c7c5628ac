"""The passes that the Inspector makes itself.

Which call it makes, the programs it compiled for it, the pass made anew when something changed,
sweeps. The user's model is never changed by one, whatever it raises.
"""

"""The passes that the Inspector makes itself.

This room holds the call of a pass, the programs compiled for it, the rerun after each change, and
sweeps. A pass never changes the user's model, whatever it raises.
"""

"""Noticing the calls of modules.

Sites and selections, whose call it is, the layers that are open around calls, and how methods are
redirected to them. When the last layer closes, every class is what it was. This room does not
know what a layer does with a call.
"""

"""Intercepting the calls of modules.

This room names and selects sites, attributes calls to a model, keeps the layers that are open
around calls, and redirects methods to them. When the last layer closes, every class is as it was.
This room does not know what a layer does with a call.
"""

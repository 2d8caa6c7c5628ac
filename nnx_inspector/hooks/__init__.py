"""Intercepting the calls of modules.

This room names and selects sites, attributes calls to a model, keeps the hooks that are open
around calls, and redirects methods to them. When the last hook closes, every class is as it was.
This room does not know what a hook does with a call.
"""

"""What a running program asks the host and sends to it.

A program calls the host by primitives with an effect. It may get the answers when it is started
instead. Nothing here knows a site or a session.
"""

"""Messages to the browser, and the views that are drawn from them.

Messages, their layout and their pace, the saved page and the saved notebook. The protocol is the
authority for both sides. This room runs no model.
"""

"""What the browser is told, and what is drawn from it.

Messages, their layout and their pace, the saved page and the saved notebook. The protocol is the
authority for both sides. This room runs no model.
"""

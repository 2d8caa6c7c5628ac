"""Messages to the browser, and the views that are drawn from them.

This room holds the messages, their layout and pace, the saved page and the saved notebook. The
protocol is the authority for both sides. It does not run a model.
"""

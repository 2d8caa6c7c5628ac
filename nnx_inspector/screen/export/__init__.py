"""The screen without a kernel: a page, and the output of a saved notebook.

What was on screen is kept in the document and answers in place of the kernel. Nothing of the
user's model is executed, and no text of it becomes HTML.
"""

"""The screen without a kernel: a page, and the output of a saved notebook.

The document keeps the content of the screen and answers in place of the kernel. None of the user's
code runs, and no text of the model becomes HTML.
"""

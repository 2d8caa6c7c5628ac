"""Recording a loop without a screen, in a script or on a cluster.

Another process reads the recording, and may ask for perturbations (see `screen.control`). Nothing
here draws, and nothing waits for a reader.
"""

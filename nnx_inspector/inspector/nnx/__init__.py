"""The module as NNX sees it: its graph, its Variables, its modes."""

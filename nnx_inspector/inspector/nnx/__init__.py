"""A module as NNX sees it: its graph, its Variables and its modes."""

"""Steering a run from another process, through files beside its recording.

A request is one of the messages that a browser sends, in a file of its own; the run answers in its
recording. Nothing of a request is ever run as code. It does not carry requests out.
"""

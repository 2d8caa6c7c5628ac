"""What is recorded, in the experiment tracker that the user has: TensorBoard, W&B, Aim, MLflow.

A pass becomes scalars and histograms by name, a finding a text. No package of a tracker is imported
unless the user gave an object of it. This room measures nothing, and never holds up a loop.
"""

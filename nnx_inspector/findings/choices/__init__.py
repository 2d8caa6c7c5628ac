"""Rules for softmaxes that choose: the heads of attentions, and the experts of routers.

They judge what every one of the last passes shows. Nothing here imports jax.
"""

"""Training in all frameworks: the part of distributed optimizers that no framework defines.

averager: `Averager`, `Form`, and the averages of lists of gradients.
"""

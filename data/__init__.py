"""Training data: the order of samples, and loaders of microbatches.

dataloader.py   BatchOrder (order by seed and epoch, cut over replicas and microbatches), Loader, RepeatingLoader
"""

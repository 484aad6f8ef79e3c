"""1-bit optimizers: momenta (or gradients) averaged over the replicas with one bit an element.

optimizer.py: base class of the optimizers
adam.py: 1-bit Adam and 0/1 Adam
lamb.py: 1-bit LAMB
sgd.py: 1-bit SGD, whose gradients are compressed
allreduce.py: the compressed mean, with the errors of workers and servers fed back
exchange.py: gradients summed in some steps, and left local in the others
stepper.py: the step over the replicas, bucket by bucket, and the state in checkpoints
"""

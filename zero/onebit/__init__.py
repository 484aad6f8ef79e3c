"""1-bit optimizers: momenta averaged over the replicas with one bit an element, in place of gradients.

adam.py: base of the optimizers; 1-bit Adam and 0/1 Adam
lamb.py: 1-bit LAMB
allreduce.py: the compressed mean, with the errors of workers and servers fed back
exchange.py: gradients summed in some steps, and left local in the others
stepper.py: the step over the replicas, bucket by bucket, and the state in checkpoints
"""

"""One stretch of a run, from its start, or from where it stopped, to its end or a signal.

joined             processes that have met, with the run's folder, store and kernels; begin: everything built and restored
moments            a session's state, and the moments of the loop that observers are told of
first_step, recorded, replicas, rewind   observers of the loop; `train.observers`, `start`, `folder` and `watch` have others
"""

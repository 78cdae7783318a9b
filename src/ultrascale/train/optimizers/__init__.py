"""Optimizers: from gradients to new weights.

optimizer          the optimizer of a rank's parameters: begin here
compact_adamw, host_optimizer, muon   the kinds
learning_rate      a pure function of the step
gradients, loss_scale   clipping; fp16's scale
"""

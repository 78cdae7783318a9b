"""Start of a run, between the command and the first step.

agreement          all ranks were given the same run
attempts           how the previous attempt ended
fit, chosen_kernels, chosen_recompute   memory check; choice of kernels and of activation recomputation
compiled, deterministic   cache of compiled blocks; bitwise repeatable training
data_check         data compared with their manifests
trained, aside     imported weights; a run that only measures
"""

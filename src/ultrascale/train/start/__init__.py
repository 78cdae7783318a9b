"""Start of a run, between the command and the first step.

agreement          all ranks were given the same run
attempts           what became of the attempt before
fit, chosen_kernels, chosen_recompute   whether it fits; which kernels and recomputation
compiled, deterministic   compiled blocks kept; the same bits every time
data_check         data compared with their manifests
trained, aside     weights from elsewhere; a run that only measures
"""

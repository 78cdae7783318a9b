"""How a layout is put on a model. The model knows nothing of it: `models` is plain, and its seams are filled from here.

apply              the order in which everything below is put on a model; what comes out is a `share`
share              what one rank holds, and what is still to be summed at the end of a step
mesh, groups       the processes of a run; who talks to whom
data               data parallelism and ZeRO: FSDP2
tensor             tensor and sequence parallelism (with tensor_ops, tensor_loss, tensor_traffic)
context            sequences cut over ranks (with context_ring, context_gather, context_swap)
expert             experts over ranks (with expert_dispatch, all_to_all)
pipeline           the lists of `schedules` executed (with pipeline_passes, pipeline_messages, pipeline_data)
precision, fp8     dtypes
recompute          activations that are computed again (offload: that wait in the host's memory)
torch_private      what is used of torch that torch does not promise to keep
"""

"""Pipeline parallelism: the lists of `schedules`, executed.

pipeline_parallel  a rank's actions, one after the other: begin here
pipeline_passes    F, B, I and W of a stage (pipeline_weights: backward passes cut in two)
pipeline_messages  activations and gradients between stages
pipeline_data      FSDP2 under a pipeline
pipeline_torch     the same lists by torch's own runtime
"""

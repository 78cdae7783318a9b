"""Pipeline parallelism: executes the action lists of `schedules`.

pipeline_parallel  runs a rank's actions, one after the other: begin here
pipeline_passes    F, B, I and W of a stage (pipeline_weights: split backward passes)
pipeline_messages  activations and gradients between stages
pipeline_data      FSDP2 under a pipeline
pipeline_torch     the same lists under torch's own runtime
"""

"""Memory of one rank over one training step: replays the rank's actions on a ledger, by any trainer's rules; exact for ours.

replay          the whole step of a rank; begin here
stage_replay    a stage's passes, operation by operation (with stage_work, gradients)
block_walk      the rule for what a block holds, for this replay and for columns
stage_player    recorded passes, applied again instead of replayed; messages of a pipeline
sharding        FSDP2: buckets all-gathered and reduce-scattered; or parameters that stay unsharded
muon_update     temporary memory of Muon's update
ledger, tally   bytes held; FLOPs done and bytes sent
"""

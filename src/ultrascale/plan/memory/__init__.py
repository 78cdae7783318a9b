"""Replay of a rank's memory, moment by moment: the actions of its step on a ledger, by any trainer's rules; exact for ours.

replay          the whole step of a rank; begin here
stage_replay    a stage's passes, operation by operation (with stage_work, gradients, offload_replay)
stage_player    the same from the books, once a pass has been replayed; messages of a pipeline
sharding        FSDP2: buckets gathered and reduced; or state that stays whole
muon_update     the optimizer's own moment
ledger, tally   bytes held; work done and bytes sent
"""

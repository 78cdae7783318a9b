"""Memory and time of a run, predicted from `spec` and `schedules`. Python and NumPy: no torch.

Where to begin, by question. Every file opens with what it is for; `docs/planner-internals.md` has the whole.

report, view        everything that `ultrascale plan` says of one run, as data; and drawn
memory              what one rank holds, moment by moment: the actions of a step replayed (with stage_replay, ledger, sharding)
price               many layouts priced at once: where the time of a step goes, and what memory it takes
blocks, passes      seconds of one block; of one micro-batch on one rank
compute, curves     seconds of matrix products and attention
collectives, nccl   seconds of messages
pipeline            a schedule played with prices
footprint           memory of many layouts at once, from parts (with rank_loads, rank_activations, rank_state, rank_moments)
space, search       all legal layouts of some devices; the best of them
explain             why this layout, and what would change the choice
flops               model FLOPs and hardware FLOPs, which MFU and HFU count
"""

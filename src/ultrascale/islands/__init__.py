"""Training with little communication (DiLoCo): the messages between islands and the outer optimizer
(`description.sections.islands` describes them).

encoding.py     deltas of weights as bytes: fp32, bf16, int8, int4, and the rounding error
link.py         a rank and its counterparts on the other islands: arrival, mean over islands, broadcast of a state
outer_state.py  one rank's anchors, momentum, rounding residuals and deltas in flight
unsharded.py    transfer of a state to an island with another dp
outer_loop.py   sending and applying fragments; starting, stopping early, and rejoining

With a quorum, islands are started separately and continue without one that has died:

store.py        small shared values that all can read: a folder, or a server
presence.py     signs of life, and detection of silent islands
admission.py    how an island asks to join, is admitted, and receives the state of another
quorum.py       the members of each outer step; the communication thread; retry of a failed exchange among the remaining members

Each island is a separate world to torch, and to everything in `parallel`: no collective of a step crosses islands. Rank r of
every island shares a gloo group, outside torch's default group, that sends from host memory, where anchor and momentum live.
The alternative, one world with an axis of islands in its mesh, would need an explicit group for every reduction of a step, and
the end of one island would break the groups of all.
"""

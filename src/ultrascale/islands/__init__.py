"""Training with little communication: what islands send one another, and what they make of it (`description.sections.islands`
describes them).

encoding.py     moves as bytes: fp32, bf16, int8, int4, and what was rounded off
link.py         a rank and its like on the other islands: arrival, the mean of all, the state of one
outer_state.py  anchors, momentum, what is rounded off and what is under way, of one rank
whole.py        the state of one for an island of another dp
outer_loop.py   when a fragment is sent and applied; beginning anew; leaving before the end; coming back

With a quorum, islands are started apart and go on without one that has died:

store.py        a few words that all can read: a folder, or a server
presence.py     signs of life, and who has stopped giving them
admission.py    how an island knocks and is let in, and begins with the state of another
quorum.py       who does an outer step; an exchange that failed is done again by those who are left
messages.py     the thread that sends

Each island is a world of its own to torch, and to everything in `parallel`: no collective of a step crosses islands. Between
them go messages of a group that torch's own knows nothing of, of rank r of every island, over gloo and from the host's memory,
where anchor and momentum live. The alternative, one world with an axis of islands in its mesh, would have every sum of a step
name its group, and an island's end would break the groups of all.
"""

"""One file per schedule, which builds a rank's list of actions.

afab, one_f_one_b, interleaved, breadth_first   F and B
zb_h1, zb_v, dualpipe, dualpipe_v   backward passes split into I and W (with streams)
custom             from a file
"""

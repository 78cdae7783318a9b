"""One file a schedule: its list of actions for a rank.

afab, one_f_one_b, interleaved, breadth_first   F and B
zb_h1, zb_v, dualpipe, dualpipe_v   backward passes cut in two (with streams)
custom             from a file
"""

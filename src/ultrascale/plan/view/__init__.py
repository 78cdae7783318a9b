"""Views of plans: text and pictures.

plan_view, state_words        one plan, drawn; dtype and shards of its training state
search_view, recomputation    a ranking; effect of each recomputation mode
draw_schedule, step_timeline  a schedule as text, SVG and trace events
far_apart, far_view           training over slow links
"""

"""Views of plans: text and pictures.

plan_view, recomputation      one plan, drawn; effect of each recomputation mode
search_view, cost             a ranking; energy and money
draw_schedule, step_timeline  a schedule as text, SVG and trace events
far_apart, far_view           training over slow links
"""

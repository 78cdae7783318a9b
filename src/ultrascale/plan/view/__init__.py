"""What people are shown: text, pictures, flags of other trainers.

plan_view, recomputation      one plan, drawn; what each way of recomputing does
search_view, cost             a ranking; money
draw_schedule, step_timeline  a schedule as text, SVG and trace events
flags                         the same layout for other trainers
far_apart, far_view           training over slow links
"""

"""The planner in a browser: `ultrascale page`, and one plan as one file, `plan --html`.

There is no planner in JavaScript. A control changes a question, a dictionary of words; Python turns it into the arguments of
`ultrascale plan`, plans, and returns the data to draw; the page only draws it.

controls     possible questions: name, unit, range; a question as command-line arguments
plan_data    a plan as data to draw: numbers with their text
ranked       a search as data to draw: ranking, front, scaling, explanation
server       the page on 127.0.0.1, for clients with the token
folder       the page as a folder of files, planning in the browser
step         details of a step: memory of each pipeline rank, messages by axis, the roofline
documents    results of other verbs, as sections
html_file    a plan, or such a document, as one HTML file
pictures     a plan's charts as PNGs
static       HTML, CSS and JavaScript, as they are served

`cli.plan.page`, a layer above, passes in the planner.
"""

"""The planner in a browser: `ultrascale page`, and one plan as one file, `plan --html`.

There is no planner in JavaScript. A control changes a question, a dictionary of words; Python turns the question into the words
of `ultrascale plan`, plans, and answers with what is to be drawn; the page draws it and knows nothing else.

controls     what can be asked: name, unit, range; a question as words of the command line
shown        a plan as what is drawn: numbers with their text
ranked       the same of a search: ranking, front, scaling, reasons
server       the page on 127.0.0.1, to whoever has the token
folder       the page as a folder of files, planning in the browser
step         what happens inside the step: memory of each pipeline rank, messages by axis, the roofline
documents    what other verbs found, as sections
one_file     a plan, or such a document, as one HTML file
pictures     a plan's charts as PNGs
static       HTML, CSS and JavaScript, as they are served

What plans is handed in by `cli.plan.page`, above.
"""

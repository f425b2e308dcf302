"""A plan's report: one HTML file that works offline.

In come the numbers that `search.report.report_numbers` gathers, out goes text. Read:

    words     the plan as sentences, units, labels of parts (for the screen, too)
    chart     what a chart is: a figure for plotly, a sentence, and the same numbers as a table
    charts    timeline, memory, trade-offs, costs, roofline
    pictures  the model over its devices, and the network, as plain HTML
    page      all of it put into `page.html.j2`, with style and script beside it

Every chart has its numbers as a table beside it, and everything that moves is a button.
"""

"""The page of `planner ui`: sizes, a cluster and sliders in, the best plan and why it is best out.

What comes in: the fields of the form, as a browser sends them. What goes out: lines of JSON with
pieces of HTML. Read in this order:

    fields     what can be set, with a short text of what each means
    asked      the form's text as a request of the search, or one line on what is wrong with it
    answers    a question searched, first for a moment and then to its end; drawn as the report is
    worker     a process that does so, one question at a time, and stops when it is told to
    models     model files under the working folder, and no others
    app        the pages, and who may read them

A model file runs in the worker's process, and only when it was chosen. Words and numbers are those
of `planner search` and of the report (`render/`).
"""

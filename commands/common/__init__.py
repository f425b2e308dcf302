"""What commands share before they work: arguments, files that are read, parsed values.

`options` declares arguments of several commands, `question` the options of `search` and `why` and
the request they make, `inputs` loads graphs and profiles, `prediction` prices a plan file.
"""

"""The page of a run: its curves, what is remarkable, one file of HTML.

Names that other rooms may use, by file:
    curves: none
    fields: none
    html: page, shell_of
    marks: none
    read: not_shown, read_run
    run: Run
    samples: none
    verdict: none
"""

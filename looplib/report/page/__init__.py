"""The page of a run: its curves, what is remarkable, one file of HTML.

Names that other rooms may use, by file:
    curves: none
    exports: none
    fields: none
    html: none
    marks: none
    read: none
    run: none
    samples: none
    verdict: none
"""

"""The page of a run: its curves, what is remarkable, one file of HTML.

Names that other rooms may use, by file:
    content: not_shown, read_run, Run
    curves: none
    html: page, shell_of, write_of_run
    verdict: none
"""

"""`report.html`: a page about one run, or about several side by side, in one file that needs no network.

`read` reads run directories, `verdict` says in words what they show, and `html` puts both into the page, which the
scripts in `assets/` draw with uPlot.

Names that other rooms may use, by file:
    board: add
    command: add
    curves: none
    exports: none
    fields: none
    goodput: as_report
    html: none
    marks: none
    notice: none
    phases: none
    read: none
    run: none
    run_page: RunPage
    run_status: none
    samples: none
    slow_workers: none
    values: none
    verdict: none
"""

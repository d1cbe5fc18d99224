"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    alert: Condition
    background: BackgroundWriter
    clock: Clock
    observer: RunObserver
    pages: none
    reporter: Metrics, Reporter
    run_page: none
    run_report: Computation, RunProgress, RunReport, RunSettings
    sending: check_url, Sender
"""

"""Reports of a run: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    alerts: check_url, Condition, RunObserver, Sender
    clock: Clock
    reporter: BackgroundWriter, Metrics, named, names, Reporter
    run_report: peak_bytes, RunFacts, StartReport
"""

"""`python -m looplib`, whose sweeps take over the trials of a process after seconds in place of minutes."""

import sys

from looplib.__main__ import main
from looplib.sweep import jobs, study, sweep

GRACE = 6

if __name__ == "__main__":
    study.GRACE, sweep._PATIENCE = GRACE, GRACE / 2
    study.BEAT = jobs._PAUSE = 1
    sys.exit(main(sys.argv[1:]))

"""Is the launcher's command line: ``python -m autovaruna.run_varuna --machine_list FILE ... script.py arguments``."""

from __future__ import annotations

import sys

from autovaruna.varuna.launcher import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m fusecache.server`, by the keeper."""

import logging
import os

from fusecache.server.entry import main

code = main()
logging.shutdown()
os._exit(code)  # abandoned threads may hang in the origin for ever

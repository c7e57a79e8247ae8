"""`python -m fusecache.keeper CONFIG_JSON [REPORT_FD]`, by `fusecache mount`."""

import sys

from fusecache.keeper.keeper import main

main(sys.argv[1:])

"""Imported before altair and papermill: leaves out what costs them seconds of a core at every
import and serves nothing here.
"""

import sys

# jsonschema, which both import, takes this package where it is installed and has it build a grammar
# of IRIs (3 to 5 s); no schema here asks
# for that format.
sys.modules.setdefault("rfc3987_syntax", None)

"""Leaves out a package that jsonschema, which SGLang imports, takes where it is installed: it
builds a grammar of IRIs at every import.

That is 3 to 5 s of a core, a quarter of SGLang's whole import, and no schema here asks for that
format (workbench/report/lean_imports.py does so for notebooks).
"""

raise ImportError("left out of the CPU engine: SGLang starts faster without it")

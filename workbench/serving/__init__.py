"""Processes: SGLang servers started, reached, measured and ended; the GPUs they take; what their
logs say.
"""

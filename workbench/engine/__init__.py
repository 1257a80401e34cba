"""What runs inside SGLang's processes: the patch, agreement, rank reports, counting and the CPU
engine's kernels.
"""

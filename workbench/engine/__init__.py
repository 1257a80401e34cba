"""What runs inside SGLang's processes: the patch, agreement, attestation, counting and the CPU
engine's kernels.
"""

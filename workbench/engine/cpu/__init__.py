"""The CPU engine: plain-torch kernels in place of the compiled ones that SGLang's CPU and EAGLE
path calls.
"""

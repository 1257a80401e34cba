"""The draft-TP workbench: is the draft's tensor parallelism what makes EAGLE-3 slow, and what
setting is best?
"""

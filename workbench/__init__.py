"""The draft-TP workbench: is the draft's tensor parallelism what makes EAGLE-3 slow, and what setting is best?"""


def panel(profile="cpu-tiny", out="../outputs/notebook", notebook=None):
    """The interactive panel (workbench.control_panel.Panel), for a notebook's last line."""
    # Here alone, since SGLang's processes import this package too.
    from workbench.control_panel import Panel

    return Panel(profile, out, notebook)

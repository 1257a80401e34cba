"""How a CPU server gets its processes: forked from the launcher, which has imported SGLang, since
each import costs some ten seconds of a core.

On GPUs nothing changes: CUDA does not survive a fork, and SGLang spawns.
"""

import multiprocessing
import os


def fork_children(result, *args, **kwargs) -> None:
    """Fork what SGLang would spawn, each child loading its plugins anew as a spawned one does.

    Target: sglang/srt/entrypoints/engine.py:1878 ``_set_envs_and_config``, AFTER: its last step but
    one asks for ``spawn``. The launcher runs no thread then, nor has it used torch's pool: it
    starts the schedulers first of all.
    """
    from sglang.srt import plugins

    def as_spawned() -> None:
        # plugins/__init__.py:103 load_plugins would take the launcher's for the child's own
        plugins._plugins_loaded = False

    os.register_at_fork(after_in_child=as_spawned)
    multiprocessing.set_start_method("fork", force=True)

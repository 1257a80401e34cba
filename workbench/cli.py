"""The command line: workbench replay | measure | record | predict | prompts | serve | command |
probe | check | report | bench | docs. Bad input ends with one sentence and status 2.
"""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import commands
from workbench.experiment.errors import WorkbenchError
from workbench.run.lab import NARRATED

if TYPE_CHECKING:
    pass

DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
)  # full, over the quota, read-only, over a limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 valid, 1 a notebook or server failed, 2 bad input, 3 finished but
    the result is not valid.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("papermill").addFilter(_progress)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # told to end by whatever means, a run keeps what it measured
    try:
        return options.do(options)
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(
            f"workbench: {error.filename or 'a file'} cannot be written ({error.strerror}); what"
            " was measured is kept: make room, or give another --out, and --resume goes on from"
            " there.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "workbench: interrupted; what was measured is kept, --resume goes on from there.",
            file=sys.stderr,
        )
        return 130


def _progress(record: logging.LogRecord) -> bool:
    """papermill logs every output of every cell; a terminal wants the lines of progress alone."""
    text = record.getMessage()
    if record.levelno < logging.WARNING and text.startswith(NARRATED):
        record.msg, record.args = text.rstrip("\n"), ()
        return True
    return record.levelno >= logging.WARNING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description=__doc__.split(".")[0])
    subparsers = parser.add_subparsers(required=True)
    replay = subparsers.add_parser("replay", help="run the whole investigation and write a report")
    replay.add_argument("profile", help="a profile's name or YAML file, or recorded:NAME")
    replay.add_argument(
        "-p",
        dest="changes",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a field of the profile",
    )
    replay.add_argument("--out", type=Path, help="the run's folder (default: outputs/PROFILE-TIME)")
    replay.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out (default: the newest of this profile)",
    )
    replay.add_argument(
        "--skip", metavar="NOTEBOOK", action="append", default=[], help="leave a notebook out"
    )
    replay.set_defaults(do=commands.replay)
    measure = subparsers.add_parser(
        "measure", help="run a profile's blocks without notebooks, on a machine without Jupyter"
    )
    measure.add_argument("profile")
    measure.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    measure.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the run's folder; blocks that are in it already are not measured again",
    )
    measure.set_defaults(do=commands.measure)
    record = subparsers.add_parser(
        "record",
        help=(
            "keep a finished run as fixtures/recordings/NAME, which replay recorded:NAME renders"
            " anywhere"
        ),
    )
    record.add_argument("run", type=Path, metavar="RUN", nargs="?", help="a run's folder")
    record.add_argument("name", metavar="NAME", nargs="?")
    record.add_argument(
        "--anew",
        action="store_true",
        help="instead judge every recording again by the rules of today; logs stay as they are",
    )
    record.set_defaults(do=commands.record)
    check = subparsers.add_parser(
        "check", help="everything that can be known before a server is started"
    )
    check.add_argument("profile")
    check.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    check.add_argument(
        "--gpus",
        metavar="NUMBERxSIZE",
        help="reckon with such GPUs, e.g. 8x96GiB, instead of those of this machine",
    )
    check.set_defaults(do=commands.check)
    predict = subparsers.add_parser(
        "predict",
        help=(
            "before any measurement: every stage, tokens/s and own-N over shared, by the inputs of"
            " a run on fewer or other GPUs, or by inputs given by hand"
        ),
    )
    predict.add_argument("profile")
    predict.add_argument(
        "folder",
        metavar="RUN",
        nargs="?",
        help="a run whose log holds its machine's inputs: a folder, or recorded:NAME",
    )
    predict.add_argument(
        "-p",
        dest="changes",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a field of the profile, or an input of the machine: memory_bandwidth (bytes/s),"
        " collective_latency (s), matrix_rate (operations/s), kernel_in_graph (s)",
    )
    predict.set_defaults(do=commands.predict)
    prompts = subparsers.add_parser(
        "prompts",
        help="make a file of prompts from chat JSONL, ShareGPT or text, by the target's tokenizer",
    )
    prompts.add_argument("source", type=Path, nargs="+", metavar="SOURCE")
    prompts.add_argument("--target", type=Path, required=True, help="the target's folder")
    prompts.add_argument("--out", type=Path, required=True, help="the file to write")
    prompts.add_argument("--count", type=int, default=64, help="the most to keep (default 64)")
    prompts.add_argument("--max-tokens", type=int, help="leave out what is longer")
    prompts.add_argument(
        "--held-out",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="keep this share, chosen by content: what a draft is trained on must be the rest",
    )
    prompts.add_argument("--seed", type=int, default=0, help="of that choice")
    prompts.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="where the folder has none"
    )
    prompts.add_argument(
        "--trust-remote-code", action="store_true", help="run the folder's own tokenizer code"
    )
    prompts.set_defaults(do=commands.prompts)
    serve = subparsers.add_parser(
        "serve", help="start one server in the foreground as a measurement would; Ctrl-C ends it"
    )
    command = subparsers.add_parser(
        "command", help="print environment and command of a server, to start it without a workbench"
    )
    for one in (serve, command):
        one.add_argument("profile")
        one.add_argument(
            "--arm", default="shared", help="none, shared, own-1, ... (default shared)"
        )
        one.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    serve.add_argument("--out", type=Path, help="the server's log (default: outputs/serve.log)")
    serve.set_defaults(do=commands.serve)
    command.add_argument("--unit", action="store_true", help="as lines of a systemd unit")
    command.set_defaults(do=commands.command)
    probe = subparsers.add_parser(
        "probe", help="does the installed SGLang have an option for the draft's TP size?"
    )
    probe.set_defaults(do=commands.probe)
    report = subparsers.add_parser(
        "report",
        help="write verdict.json and report.html of a run again, or put two runs side by side",
    )
    report.add_argument("folder", metavar="RUN", help="a run's folder")
    report.add_argument(
        "other",
        nargs="?",
        metavar="OTHER",
        help="another run's folder, or recorded:NAME: writes one page with both",
    )
    report.add_argument(
        "--out", type=Path, help="the page of two runs (default: outputs/RUN-and-OTHER.html)"
    )
    report.set_defaults(do=commands.report)
    docs = subparsers.add_parser(
        "docs", help="make README.md and docs/*.md from docs/src and the recordings"
    )
    docs.add_argument(
        "--check", action="store_true", help="write nothing; status 1 where a page would change"
    )
    docs.set_defaults(do=commands.docs)
    bench = subparsers.add_parser(
        "bench", help="measure this machine, or a way of measuring on it"
    ).add_subparsers(required=True)
    arms = bench.add_parser(
        "arms", help="the same comparison by hot arms and by restarts: precision against time"
    )
    arms.add_argument("profile", nargs="?", default="cpu-tiny")
    arms.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    arms.add_argument(
        "--out", type=Path, help="the folder of its log (default: outputs/bench-PROFILE-TIME)"
    )
    arms.add_argument("-a", default="own-1", metavar="ARM")
    arms.add_argument("-b", default="shared", metavar="ARM")
    arms.add_argument(
        "--pairs", type=int, default=12, help="pairs of blocks in one server (default 12)"
    )
    arms.add_argument("--starts", type=int, default=4, help="starts of each arm (default 4)")
    arms.set_defaults(do=commands.bench_arms)
    machine = bench.add_parser(
        "machine",
        help=(
            "copies, products, launches and collectives as the profile uses this machine, for"
            " 02_budget"
        ),
    )
    machine.add_argument("profile", nargs="?", default="cpu-tiny")
    machine.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    machine.set_defaults(do=commands.bench_machine)
    return parser


if __name__ == "__main__":
    sys.exit(main())

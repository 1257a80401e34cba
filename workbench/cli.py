"""The command line: workbench replay | measure | record | predict | probe | check | report | bench.
Bad input ends with one sentence and status 2.
"""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.experiment.profile_sections import ROOT
from workbench.run.lab import NARRATED

if TYPE_CHECKING:
    from workbench.run.lab import Lab

OUTPUTS = ROOT / "outputs"
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
    commands = parser.add_subparsers(required=True)
    replay = commands.add_parser("replay", help="run the whole investigation and write a report")
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
    replay.set_defaults(do=_replay)
    measure = commands.add_parser(
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
    measure.set_defaults(do=_measure)
    record = commands.add_parser(
        "record",
        help=(
            "keep a finished run as fixtures/recordings/NAME, which replay recorded:NAME renders"
            " anywhere"
        ),
    )
    record.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    record.add_argument("name", metavar="NAME")
    record.set_defaults(do=_record)
    check = commands.add_parser(
        "check", help="everything that can be known before a server is started"
    )
    check.add_argument("profile")
    check.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    check.set_defaults(do=_check)
    predict = commands.add_parser(
        "predict",
        help=(
            "before any measurement: own-N over shared on more GPUs, by the inputs of a run with"
            " fewer"
        ),
    )
    predict.add_argument("profile")
    predict.add_argument(
        "folder",
        metavar="RUN",
        help="a run whose log holds its machine's inputs: a folder, or recorded:NAME",
    )
    predict.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    predict.set_defaults(do=_predict)
    probe = commands.add_parser(
        "probe", help="does the installed SGLang have an option for the draft's TP size?"
    )
    probe.set_defaults(do=_probe)
    report = commands.add_parser(
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
    report.set_defaults(do=_report)
    bench = commands.add_parser(
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
    arms.set_defaults(do=_bench_arms)
    machine = bench.add_parser(
        "machine",
        help=(
            "copies, products, launches and collectives as the profile uses this machine, for"
            " 02_budget"
        ),
    )
    machine.add_argument("profile", nargs="?", default="cpu-tiny")
    machine.add_argument("-p", dest="changes", metavar="NAME=VALUE", action="append", default=[])
    machine.set_defaults(do=_bench_machine)
    return parser


def _replay(options: argparse.Namespace) -> int:
    from workbench.experiment.profile import load
    from workbench.predict import preflight
    from workbench.replay import replay
    from workbench.run.lab import open_lab
    from workbench.run.recording import PREFIX

    name = options.profile.replace(":", "-")
    if not options.profile.startswith(PREFIX):
        profile = load(options.profile, changes(options.changes))
        preflight.refuse(preflight.check(profile))
        name = profile.name
    out = options.out or (
        _newest(name) if options.resume else OUTPUTS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    if options.out and not options.resume and (out / "runs.jsonl").exists():
        raise BadInput(
            "out",
            f"{out.name} holds a run already",
            "add --resume to go on with it, or give another folder",
        )
    command = [
        "workbench",
        "replay",
        options.profile,
        *(word for change in options.changes for word in ("-p", change)),
    ]
    return replay(
        open_lab(options.profile, out.resolve(), changes(options.changes), command),
        resume=options.resume,
        skip=options.skip,
    )


def _measure(options: argparse.Namespace) -> int:
    from workbench.answers import budget, negative_control
    from workbench.experiment import plans
    from workbench.experiment.profile import load
    from workbench.judge import verdict
    from workbench.predict import preflight
    from workbench.run.lab import open_lab

    checks = preflight.check(load(options.profile, changes(options.changes)))
    preflight.refuse(
        check for check in checks if check.status != "warned"
    )  # the lab checks its arms again, and warns
    lab = open_lab(options.profile, options.out.resolve(), changes(options.changes), sys.argv)
    if why := budget.basis(
        lab
    ).why:  # else the log holds the machine's inputs now, as after 02_budget
        logging.getLogger(__name__).warning("there will be no prediction: %s", why)
    try:
        lab.measure(plans.draft_tp(lab.profile, len(lab.prompts)))
        for sentence in negative_control.corrupted_rank(lab):
            print(sentence)
    except KeyboardInterrupt:
        lab.stopped("by hand")
        raise
    print(verdict.sentence(lab.verdict))
    return verdict.exit_status(lab.verdict)


def _record(options: argparse.Namespace) -> int:
    from workbench.answers import profiled_cycles
    from workbench.replay import missing
    from workbench.run import recording
    from workbench.run.lab import reopen

    lab = reopen(options.run)
    profiled_cycles.decompositions(lab)  # into the log: the traces themselves are not kept
    made = recording.record(lab.folder, lab.profile, lab.prompts, options.name, missing(lab))
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    print(
        f"{made.relative_to(ROOT)}: {size / 1e6:.2f} MB; workbench replay"
        f" {recording.PREFIX}{options.name} renders it"
    )
    return 0


def _check(options: argparse.Namespace) -> int:
    from workbench.experiment.profile import load
    from workbench.predict import preflight

    checks = preflight.check(load(options.profile, changes(options.changes)))
    for check in checks:
        print(
            f"{check.status:8} {check.name}: {check.detail}"
            + (f" -> {check.mend}" if check.mend else "")
        )
    preflight.refuse(checks)
    return 0


def _predict(options: argparse.Namespace) -> int:
    from workbench.answers import budget
    from workbench.experiment.profile import load
    from workbench.predict import more_ranks

    profile, found = (
        load(options.profile, changes(options.changes)),
        budget.basis(_run(options.folder)),
    )
    if found.inputs is None:
        raise BadInput(
            "RUN",
            f"there is no prediction from it: {found.why}",
            "name a run that measured its machine",
        )
    print(more_ranks.table(profile, found).to_string(index=False, float_format="{:.2f}".format))
    print(more_ranks.sentence(profile, found))
    return 0


def _probe(options: argparse.Namespace) -> int:
    from workbench.answers import probe

    print(probe.answer(probe.probe()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from workbench.judge import verdict
    from workbench.publish import beside, publish
    from workbench.run.recording import PREFIX

    if options.other is None:
        if options.folder.startswith(PREFIX):
            raise BadInput(
                "RUN",
                f"{options.folder} is kept as it is",
                f"replay it: workbench replay {options.folder}",
            )
        lab = _run(options.folder)
        print(publish(lab)["sentence"])
        return verdict.exit_status(lab.verdict)
    first, second = _run(options.folder), _run(options.other)
    out = options.out or OUTPUTS / f"{first.folder.name}-and-{second.folder.name}.html"
    print(beside(first, second, out))
    print(f"page: {out}")
    return max(verdict.exit_status(first.verdict), verdict.exit_status(second.verdict))


def _run(name: str) -> Lab:
    """The lab of a run's folder, or of a recording by its name."""
    from workbench.run import recording
    from workbench.run.lab import reopen

    if not name.startswith(recording.PREFIX):
        return reopen(Path(name))
    if (short := name.removeprefix(recording.PREFIX)) not in recording.names():
        raise BadInput(
            "RUN", f"there is no recording {short!r}", f"use one of {', '.join(recording.names())}"
        )
    return reopen(recording.FOLDER / short)


def _bench_arms(options: argparse.Namespace) -> int:
    from workbench.answers import bench_arms
    from workbench.experiment.profile import load
    from workbench.run.lab import open_lab

    changed = changes(options.changes)
    out = (
        options.out
        or OUTPUTS / f"bench-{load(options.profile, changed).name}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    print(
        bench_arms.arms(
            open_lab(options.profile, out.resolve(), changed, sys.argv),
            options.a,
            options.b,
            options.pairs,
            options.starts,
        )
    )
    print(f"curves: {out / 'bench.svg'}")
    return 0


def _bench_machine(options: argparse.Namespace) -> int:
    from workbench.experiment.profile import load
    from workbench.predict import measure_machine

    measure_machine.main(load(options.profile, changes(options.changes)))
    return 0


def changes(given: Sequence[str]) -> dict[str, Any]:
    """``["pairs=12"]`` as ``{"pairs": 12}``, values read as YAML.

    Raises: BadInput for what is no NAME=VALUE.
    """
    found = {}
    for change in given:
        name, equals, value = change.partition("=")
        if not equals or not name:
            raise BadInput("-p", f"{change!r} is no NAME=VALUE", "write for example -p pairs=12")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BadInput(
                name, f"{value!r} cannot be read", "write a number, a word or a YAML list"
            ) from None
    return found


def _newest(name: str) -> Path:
    runs = sorted(OUTPUTS.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise BadInput(
            "resume",
            f"there is no run of {name} under outputs/",
            "leave --resume out, or name its folder with --out",
        )
    return runs[-1]


if __name__ == "__main__":
    sys.exit(main())

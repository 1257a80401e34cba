"""What each command of the command line does."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import ROOT

OUTPUTS = ROOT / "outputs"


if TYPE_CHECKING:
    from workbench.run.lab import Run


def replay(options: argparse.Namespace) -> int:
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


def measure(options: argparse.Namespace) -> int:
    from workbench.answers import budget, experiments, negative_control
    from workbench.experiment.profile import load
    from workbench.judge import told
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
        experiments.measure(lab, "draft_tp")
        for sentence in negative_control.corrupted_rank(lab):
            print(sentence)
    except KeyboardInterrupt:
        lab.stopped("by hand")
        raise
    print(told.sentence(lab.verdict))
    return told.exit_status(lab.verdict)


def record(options: argparse.Namespace) -> int:
    from workbench.answers import profiled_cycles
    from workbench.replay import missing
    from workbench.run import recording
    from workbench.run.lab import reopen

    if options.anew:
        for name in recording.names():
            changed = recording.judge_anew(name)
            print(f"{recording.PREFIX}{name}: {len(changed)} entries of its verdict changed")
        return 0
    if options.run is None or options.name is None:
        raise BadInput("RUN NAME", "are missing", "name a run's folder and the recording")
    lab = reopen(options.run)
    profiled_cycles.decompositions(lab)  # into the log: the traces themselves are not kept
    made = recording.record(lab.folder, lab.profile, lab.prompts, options.name, missing(lab))
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    print(
        f"{made.relative_to(ROOT)}: {size / 1e6:.2f} MB; workbench replay"
        f" {recording.PREFIX}{options.name} renders it"
    )
    return 0


def check(options: argparse.Namespace) -> int:
    from workbench.experiment.profile import load
    from workbench.predict import preflight

    checks = preflight.check(
        load(options.profile, changes(options.changes)), free_bytes=_sizes(options.gpus)
    )
    for check in checks:
        print(
            f"{check.status:8} {check.name}: {check.detail}"
            + (f" -> {check.mend}" if check.mend else "")
        )
    preflight.refuse(checks)
    return 0


def _sizes(gpus: str | None) -> list[int] | None:
    """``8x96GiB`` as eight times so many bytes; None for None.

    Raises: BadInput for anything else.
    """
    if gpus is None:
        return None
    unit = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20}
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?) ?(GiB|GB|MiB)", gpus.strip())
    if not found or not float(found[2]):
        raise BadInput("--gpus", f"{gpus!r} is no NUMBERxSIZE", "write for example --gpus 8x96GiB")
    return [int(float(found[2]) * unit[found[3]])] * int(found[1])


def predict(options: argparse.Namespace) -> int:
    from workbench.answers import budget
    from workbench.experiment.profile import load
    from workbench.experiment.profile_sections import plain_number
    from workbench.predict import by_hand, estimate, model_shape, more_ranks

    given = changes(options.changes)
    inputs = {
        name: plain_number(name, given.pop(name)) for name in list(given) if name in by_hand.INPUTS
    }
    profile, measured = load(options.profile, given), None
    source = "by hand; what was not given takes no time"
    if profile.reported and not options.folder:
        inputs = profile.reported.inputs()[0] | inputs
    if options.folder:
        run = _run(options.folder)
        found = budget.basis(run)
        if found.inputs is None:
            raise BadInput(
                "RUN",
                f"there is no prediction from it: {found.why}",
                "name a run that measured its machine, or give its inputs by -p",
            )
        measured, source = found.inputs, f"{options.folder}, measured on {run.profile.about}"
        if run.profile.about != profile.about:
            source += f", which is another machine than the profile's ({profile.about})"
        if profile.tp > measured.ranks and "collective_latency" not in inputs:
            source += f"; latencies of {measured.ranks} ranks are taken for {profile.tp}"
    if measured and not inputs:
        print(more_ranks.table(profile, found).to_string(index=False, float_format="{:.2f}".format))
        print(more_ranks.sentence(profile, found))
    target, draft = (
        model_shape.read(getattr(profile.pair, side), f"pair.{side}")
        for side in ("target", "draft")
    )
    machine = by_hand.machine(measured, profile.tp, inputs)
    told = estimate.estimate(profile, target, draft, machine)
    for table in (estimate.stages(told), estimate.arms(told)):
        print(table.to_string(index=False, float_format="{:.2f}".format, na_rep=""))
    print("\n".join(estimate.sentences(told, source, inputs)))
    return 0


def prompts(options: argparse.Namespace) -> int:
    from workbench.experiment import prompt_source
    from workbench.predict import prompt_file
    from workbench.serving import tokenizing

    if not 0 < options.held_out <= 1:
        raise BadInput("--held-out", f"is {options.held_out}", "give a share above 0 and up to 1")
    read = [source for path in options.source for source in prompt_source.read(path)]
    sources = prompt_source.without_repeats(read)
    kept, rest = prompt_source.split(sources, options.held_out, options.seed)
    kept = kept[: options.count]
    if not kept:
        raise BadInput("--held-out", f"leaves none of {len(sources)} prompts", "raise it")
    ids = tokenizing.tokenize(
        kept,
        options.target,
        trust_remote_code=options.trust_remote_code,
        chat_template=options.chat_template,
    )
    chosen = prompt_file.chosen(ids, options.max_tokens)
    if not chosen:
        raise BadInput(
            "--max-tokens", f"{options.max_tokens} leaves none of {len(kept)} prompts", "raise it"
        )
    prompt_file.write(options.out, chosen)
    lengths = sorted(map(len, chosen))
    print(
        f"{options.out}: {len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens, half of"
        f" them {lengths[len(lengths) // 2]} or more. Of {len(read)} read,"
        f" {len(read) - len(sources)} were repeats, {len(rest)} were not held out,"
        f" {len(kept) - len(lengths)} too long or equal as tokens."
    )
    return 0


def serve(options: argparse.Namespace) -> int:
    from workbench.experiment.arms import Arm
    from workbench.experiment.profile import load
    from workbench.predict import preflight
    from workbench.serving import foreground

    profile, arm = load(options.profile, changes(options.changes)), Arm.parse(options.arm)
    preflight.refuse(preflight.check(profile, [arm]))
    return foreground.serve(profile, arm, options.out)


def command(options: argparse.Namespace) -> int:
    from workbench.experiment.arms import Arm
    from workbench.experiment.profile import load
    from workbench.serving import unit_file

    profile, arm = load(options.profile, changes(options.changes)), Arm.parse(options.arm)
    print(unit_file.unit(profile, arm) if options.unit else unit_file.shell(profile, arm))
    return 0


def probe(options: argparse.Namespace) -> int:
    from workbench.answers import probe

    print(probe.answer(probe.probe()))
    return 0


def report(options: argparse.Namespace) -> int:
    from workbench.judge import told
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
        print(publish(lab).sentence)
        return told.exit_status(lab.verdict)
    first, second = _run(options.folder), _run(options.other)
    out = options.out or OUTPUTS / f"{first.folder.name}-and-{second.folder.name}.html"
    print(beside(first, second, out))
    print(f"page: {out}")
    return max(told.exit_status(first.verdict), told.exit_status(second.verdict))


def _run(name: str) -> Run:
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


def docs(options: argparse.Namespace) -> int:
    from workbench import docs

    changed = docs.stale() if options.check else docs.write()
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {'is not' if options.check else 'is now'} up to date")
    return int(options.check and bool(changed))


def bench_arms(options: argparse.Namespace) -> int:
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
    print(f"every point of both: {out / 'bench.json'}")
    return 0


def bench_machine(options: argparse.Namespace) -> int:
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

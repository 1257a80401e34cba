"""Which replay is at work on a folder: found again, told from a dead one, and never two at once."""

import os
import subprocess
import sys
import time

import pytest

from workbench.experiment.errors import BadInput
from workbench.run import ticket


@pytest.fixture
def process():
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


def test_a_run_is_found_while_its_process_lives_and_not_after(process, tmp_path):
    ticket.write(tmp_path / "a-run", ticket.of_process(process.pid))
    assert ticket.alive(tmp_path) == tmp_path / "a-run"
    process.kill()
    time.sleep(0.2)  # dead, and not yet waited for by its parent
    assert ticket.alive(tmp_path) is None and not ticket.read(tmp_path / "a-run").alive


def test_a_later_process_of_the_same_number_is_not_the_run(process, tmp_path):
    real = ticket.of_process(process.pid)
    ticket.write(tmp_path / "run", ticket.Ticket(real.pid, real.started - 1))
    assert ticket.alive(tmp_path) is None


def test_a_second_replay_on_a_folder_is_refused_and_names_the_first(process, tmp_path):
    ticket.write(tmp_path, ticket.of_process(process.pid))
    with pytest.raises(BadInput, match=f"is being measured by process {process.pid}"):
        with ticket.Claim(tmp_path):
            pass
    assert ticket.read(tmp_path).pid == process.pid


def test_a_claim_says_where_it_is_and_how_it_ended(tmp_path):
    with ticket.Claim(tmp_path) as claim:
        claim.at("04_draft_tp", 4, 8)
        assert ticket.read(tmp_path) == ticket.Ticket(
            os.getpid(), ticket.of_process(os.getpid()).started, "04_draft_tp", 4, 8
        )
        assert ticket.alive(tmp_path.parent) == tmp_path
        claim.ended(3)
    assert ticket.read(tmp_path).ended == 3 and ticket.alive(tmp_path.parent) is None


def test_a_claim_that_breaks_ends_as_failed_and_frees_the_folder(tmp_path):
    with pytest.raises(RuntimeError), ticket.Claim(tmp_path):
        raise RuntimeError
    assert ticket.read(tmp_path).ended == 1
    with ticket.Claim(tmp_path):
        pass


def test_a_damaged_ticket_is_none(tmp_path):
    (tmp_path / ticket.TICKET).write_text("{")
    assert ticket.read(tmp_path) is None and ticket.read(tmp_path / "nowhere") is None

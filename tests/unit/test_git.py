"""The commit and the changes that a run starts with: recorded if it costs nothing, and never in its
way.
"""

import stat
import subprocess
import time

import pytest

from jaxdp.run import start


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, in the current directory, and a run directory beside it."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name in ("repository/inside", "run"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository/inside")
    (tmp_path / "repository/code.py").write_text("a = 1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (
        ["init", "-q", ".."],
        ["add", "../code.py"],
        [*identity, "commit", "-q", "-m", "first"],
    ):
        subprocess.run(["git", *command], check=True)
    return tmp_path


def test_the_commit_and_the_changes_of_a_repository(repository):
    run, code = repository / "run", repository / "repository/code.py"
    (run / "git.diff").write_text("of the start before")
    (run / "git.diff").chmod(0o644)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert (
        start.git_facts(run) == {"git": {"commit": commit, "changed": False}}
        and not (run / "git.diff").exists()
    )
    code.write_text("a = 2\n")
    assert start.git_facts(run) == {"git": {"commit": commit, "changed": True}}
    assert (run / "git.diff").read_text().endswith("-a = 1\n+a = 2\n")
    assert stat.S_IMODE((run / "git.diff").stat().st_mode) == 0o600, "it may contain passwords"
    code.write_text("a = 3\n" * 100_000)
    assert start.git_facts(run)["git"]["changed"]
    diff = (run / "git.diff").read_text()
    assert start.LONGEST_DIFF - 20 < len(diff) < start.LONGEST_DIFF + 20 and diff.endswith(
        "\n+a = 3\n[cut]\n"
    )


def test_no_repository_and_no_git_are_no_error(repository, monkeypatch):
    (repository / "run" / "git.diff").write_text("of the start before")
    monkeypatch.chdir(repository)
    assert (
        start.git_facts(repository / "run") == {} and not (repository / "run" / "git.diff").exists()
    )
    monkeypatch.chdir(repository / "repository")
    assert start.git_facts(repository / "run") and start.git_facts(repository / "missing")
    monkeypatch.setenv("PATH", str(repository))
    assert start.git_facts(repository / "run") == {}


def test_a_diff_without_an_end_is_cut(repository, monkeypatch):
    """Nothing of it is read beyond the limit."""
    script = '#!/bin/sh\ncase "$*" in *rev-parse*) echo 1234;; *) exec yes +a;; esac\n'
    (repository / "git").write_text(script)
    (repository / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
    assert start.git_facts(repository / "run") == {"git": {"commit": "1234", "changed": True}}
    diff = (repository / "run/git.diff").read_text()
    assert start.LONGEST_DIFF - 20 < len(diff) < start.LONGEST_DIFF + 20 and diff.endswith(
        "+a\n[cut]\n"
    )


def test_a_git_that_does_not_answer_is_not_waited_for(repository, monkeypatch):
    (repository / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (repository / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
    monkeypatch.setattr(start, "GIT_TIMEOUT", 0.1)
    began = time.monotonic()
    assert start.git_facts(repository / "run") == {} and time.monotonic() - began < 10

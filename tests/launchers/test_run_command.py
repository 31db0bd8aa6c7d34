from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S, eventually

from unisono.tuning.machine.levels import processors

RUN = (sys.executable, "-m", "unisono", "run")
# With this setting, ranks have more time to notice a failure, and to end after their report, than a busy machine needs.
PATIENT = """
import sys
from unisono.launchers import job, output
from unisono.cli.main import main
job.AFTER_FAILURE = ((80.0, 15), (90.0, 9))
output.HOLD_S = 80.0
sys.exit(main())
"""
RUN_PATIENTLY = (sys.executable, "-c", PATIENT, "run")

Script = Callable[[str], Path]


def preceded(statements: str) -> tuple[str, ...]:
    """Return a launcher that runs some statements first."""
    return (
        sys.executable,
        "-c",
        f"{statements}\nimport sys; from unisono.cli.entry import command; sys.exit(command())",
        "run",
    )


def ignoring(number: signal.Signals) -> tuple[str, ...]:
    """Return a launcher that starts with a signal ignored."""
    return handling(number, signal.SIG_IGN)


def handling(number: signal.Signals, handler: signal.Handlers) -> tuple[str, ...]:
    """Return a launcher that starts with SIG_IGN or SIG_DFL for a signal, whatever these tests were started with."""
    code = f"import os, signal, sys; signal.signal({int(number)}, {int(handler)}); os.execv(sys.argv[1], sys.argv[1:])"
    return (sys.executable, "-c", code, *RUN)


ELASTIC = Path(__file__).resolve().parents[2] / "examples" / "elastic.py"
FAIL = 'import unisono as un; raise un.PeerLostError("rank 1 has died")'
WAIT = "import time; time.sleep(600)"


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script that can use the variable `rank`; return its path."""

    def write(body: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text('import os, sys\nrank = int(os.environ["UNISONO_RANK"])\n' + textwrap.dedent(body))
        return path

    return write


@pytest.fixture(autouse=True)
def no_rank_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not processes_of(tmp_path)


def ranks_of(folder: Path) -> list[int]:
    """Return the ids of the processes that run the script in `folder`, without their launcher."""
    return [int(process.partition(":")[0]) for process in processes_of(folder) if "\0run\0" not in process]


def processes_of(folder: Path) -> list[str]:
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue
        if str(folder) in command:
            results.append(f"{path.parent.name}: {command}")
    return results


def run(*arguments: object, launcher: Sequence[str] = RUN, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **environ},
        check=False,
    )


@contextmanager
def started(*arguments: object, launcher: Sequence[str] = RUN) -> Iterator[subprocess.Popen[str]]:
    """Start a job, and wait until all its ranks have printed "ready". Kill the job at the end of the test."""
    command = [*launcher, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for _ in range(int(command[command.index("-n") + 1])):
                assert process.stdout.readline().endswith("ready\n")
            yield process
        finally:
            process.kill()


def test_run_keeps_each_line_whole_and_labels_it_with_its_rank(script: Script) -> None:
    program = script("""
        for line in range(300):
            for piece in (f"line {line} ", "x" * 200, f" of {rank}", chr(10)):
                sys.stdout.write(piece)
    """)
    completed = run("-n", 3, program)
    assert completed.returncode == 0
    lines = completed.stdout.splitlines()
    expected = [f"[{rank}] line {line} {'x' * 200} of {rank}" for rank in range(3) for line in range(300)]
    assert sorted(lines) == sorted(expected)
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [line for line in expected if line.startswith(f"[{rank}] ")]


def test_run_completes_a_last_line_without_line_end(script: Script) -> None:
    assert run("-n", 1, script("sys.stdout.write('no end')")).stdout == "[0] no end\n"


def test_run_keeps_stdout_and_stderr_apart(script: Script) -> None:
    completed = run("-n", 1, script("print('out'); print('err', file=sys.stderr)"))
    assert (completed.stdout, completed.stderr) == ("[0] out\n", "[0] err\n")


def test_no_label_option_omits_the_labels(script: Script) -> None:
    assert run("-n", 2, "--no-label", script("print('same')")).stdout == "same\nsame\n"


def test_arguments_reach_the_script_unchanged(script: Script) -> None:
    completed = run("-n", 1, script("print(sys.argv[1:])"), "-n", "7", "--", "--bind", "a b")
    assert completed.stdout == "[0] ['-n', '7', '--', '--bind', 'a b']\n"


READ = "print(ascii(sys.stdin.read()))"


def test_rank_0_reads_the_standard_input_of_run(script: Script) -> None:
    words = [*RUN, "-n", "3", str(script(READ))]
    completed = subprocess.run(words, input="1\n2", capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert sorted(completed.stdout.splitlines()) == ["[0] '1\\n2'", "[1] ''", "[2] ''"]


def test_rank_0_reads_nothing_if_run_has_no_standard_input(script: Script) -> None:
    words = ["sh", "-c", 'exec "$@" <&-', "sh", *RUN, "-n", "2", "--no-label", str(script(READ))]
    completed = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert completed.stdout.splitlines() == ["''", "''"]


@pytest.mark.parametrize("is_background", [False, True])
def test_rank_0_reads_the_terminal_only_in_its_foreground(script: Script, is_background: bool) -> None:
    program = script("if rank == 0: print('read', ascii(sys.stdin.readline()))")
    words = [*RUN, "-n", "2", "--no-label", str(program)]
    shell = ["bash", "-ic", '"$@" & wait' if is_background else '"$@"', "bash", *words]
    assert ("read ''" if is_background else "read 'typed\\n'") in output_in_terminal(shell, "typed\n")


def output_in_terminal(command: list[str], typed: str = "") -> str:
    output = b""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    os.write(terminal, typed.encode())
    with suppress(OSError):  # EIO is the end of a terminal
        while select.select([terminal], [], [], DEADLINE_S)[0]:
            output += os.read(terminal, 4096)
    os.close(terminal)
    os.waitpid(pid, 0)
    return output.decode()


def test_ranks_have_process_groups_in_the_session_of_run_without_its_terminal(script: Script) -> None:
    program = script("""
        try:
            os.open("/dev/tty", os.O_RDWR)
        except OSError as error:
            terminal = error.strerror
        else:
            terminal = "a terminal"
        print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getsid(os.getppid()), terminal)
    """)
    output = output_in_terminal([*RUN, "-n", "2", "--no-label", str(program)])
    assert output.count("True True No such device or address") == 2, output


def test_run_sets_the_unisono_variables_of_each_rank(script: Script) -> None:
    program = script("""
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "STORE", "JOB")
        print(*(os.environ["UNISONO_" + name] for name in names))
    """)
    facts = [line.split()[1:] for line in sorted(run("-n", 3, program).stdout.splitlines())]
    assert [fact[:4] for fact in facts] == [[str(rank), "3", str(rank), "3"] for rank in range(3)]
    assert len({tuple(fact[4:]) for fact in facts}) == 1
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", facts[0][4])
    assert re.fullmatch(r"[0-9a-f]{32}", facts[0][5])


def test_run_replaces_torch_variables_inherited_from_another_job(script: Script) -> None:
    program = script("""
        import socket
        print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
        assert not [name for name in os.environ if name.startswith("TORCHELASTIC")]
        if rank == 0:  # as the store of torch does
            with socket.socket() as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
                listening.listen()
    """)
    of_another = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "other.invalid", "MASTER_PORT": "1"}
    completed = run("-n", 2, program, **of_another, TORCHELASTIC_RUN_ID="another", TORCHELASTIC_USE_AGENT_STORE="True")
    assert (sorted(completed.stdout.splitlines()), completed.stderr) == (["[0] 0 2 0 2", "[1] 1 2 1 2"], "")


@pytest.mark.night
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_torch_programs_can_form_a_process_group_under_run(script: Script, backend: str) -> None:
    pytest.importorskip("torch")
    program = script(f"""
        import torch
        import torch.distributed as dist
        dist.init_process_group({backend!r})
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.destroy_process_group()
        import unisono as un
        with un.init() as world:
            print(x.tolist(), world.size)
    """)
    completed = run("-n", 2, program)
    assert (completed.returncode, sorted(completed.stdout.splitlines())) == (
        0,
        ["[0] [2.0, 2.0, 2.0] 2", "[1] [2.0, 2.0, 2.0] 2"],
    )


def test_job_key_reaches_ranks_only_by_a_pipe(script: Script) -> None:
    program = script("""
        key = os.read(int(os.environ["UNISONO_KEY_FD"]), 1000)
        everything = b"".join(open(f"/proc/self/{name}", "rb").read() for name in ("environ", "cmdline"))
        print(key.hex(), key in everything or key.hex().encode() in everything)
    """)
    first, second = (sorted(run("-n", 2, program).stdout.splitlines()) for _ in range(2))
    keys = {line.split()[1] for line in first}
    assert [line.split()[2] for line in first] == ["False", "False"]
    assert len(keys) == 1
    assert len(bytes.fromhex(keys.pop())) == 32
    assert first[0] != second[0]


def test_run_divides_cores_among_openmp_threads_of_ranks(script: Script) -> None:
    program = script("print(os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))
    assert run("-n", 1, program).stdout == f"[0] {cores}\n"
    assert set(run("-n", cores + 1, "--no-label", program).stdout.split()) == {"1"}
    assert run("-n", 1, program, OMP_NUM_THREADS="5").stdout == "[0] 5\n"


def test_bind_core_pins_ranks_to_cores_in_turn(script: Script) -> None:
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) + 1
    completed = run(
        "-n", size, "--bind", "core", script("print(*os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])")
    )
    assert sorted(completed.stdout.splitlines()) == sorted(
        f"[{rank}] {cores[rank % len(cores)]} 1" for rank in range(size)
    )


def test_bind_numa_gives_each_rank_the_allowed_cores_of_a_node(script: Script) -> None:
    nodes = [set(node) & os.sched_getaffinity(0) for node in processors().levels.get("numa", ())]
    nodes = [node for node in nodes if node] or [os.sched_getaffinity(0)]
    size = len(nodes) + 1
    completed = run("-n", size, "--bind", "numa", script("print(*sorted(os.sched_getaffinity(0)))"))
    expected = [" ".join(map(str, sorted(nodes[rank % len(nodes)]))) for rank in range(size)]
    assert sorted(completed.stdout.splitlines()) == sorted(f"[{rank}] {cores}" for rank, cores in enumerate(expected))


def test_run_sets_variables_and_the_folder_of_traces(script: Script, tmp_path: Path) -> None:
    program = script("print(os.environ['A'], os.environ['B'], os.environ['UNISONO_TRACE'])")
    completed = run("-n", 1, "--env", "A=x=y", "--env", "B", "--trace", tmp_path / "traces", program, B="from here")
    assert completed.stdout == f"[0] x=y from here {tmp_path / 'traces'}\n"


def test_run_starts_modules_and_executables(tmp_path: Path) -> None:
    assert run("-n", 1, "-m", "json.tool", "--help").stdout.startswith("[0] usage")
    assert sorted(run("-n", 2, "--", "echo", "-n", "3").stdout.splitlines()) == ["[0] 3", "[1] 3"]


def test_run_shows_root_cause_first_and_exits_with_its_code(script: Script) -> None:
    program = script(f"""
        import time
        if rank != 1:
            {FAIL}
        time.sleep(1)
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("the cause")
    """)
    completed = run("-n", 3, program, launcher=RUN_PATIENTLY)
    assert completed.returncode == 1
    lines = completed.stderr.splitlines()
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert "[1] ValueError: the cause" in lines
    assert lines[-3] == "unisono: rank 1 exited with code 1"
    assert lines[-2] == "unisono: rank 0 then exited with code 1 (PeerLostError: rank 1 has died)"
    assert not [line for line in lines if line.startswith(("[0]", "[2]"))]


@pytest.mark.night
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_run_shows_root_cause_in_torch_programs(script: Script, backend: str) -> None:
    pytest.importorskip("torch")
    program = script(f"""
        import atexit, time
        import torch
        import torch.distributed as dist
        dist.init_process_group({backend!r})
        if rank == 1:
            atexit.register(time.sleep, 1)  # so that the others may end before
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(3))
    """)
    completed = run("-n", 2, program, launcher=RUN_PATIENTLY)
    lines = completed.stderr.splitlines()
    assert lines[0] == "[1] [rank1]: Traceback (most recent call last):"
    assert "[1] [rank1]: ValueError: the cause" in lines
    assert lines[-2] == "unisono: rank 1 exited with code 1"
    assert re.match(r"unisono: rank 0 then exited with code 1 \(.*Connection closed by peer", lines[-1])
    assert not [line for line in lines if line.startswith("[0]")]


def test_verbose_shows_the_tracebacks_of_all_ranks_once(script: Script) -> None:
    completed = run(
        "-n", 2, "--verbose", script(f"if rank: raise ValueError('the cause')\n{FAIL}"), launcher=RUN_PATIENTLY
    )
    assert completed.returncode == 1
    assert completed.stderr.count("Traceback") == 2
    assert "unisono: rank 1 exited with code 1" in completed.stderr


def test_run_exits_with_the_code_of_the_root_cause(script: Script) -> None:
    completed = run("-n", 2, script(f"if rank == 1: sys.exit(7)\n{FAIL}"), launcher=RUN_PATIENTLY)
    assert completed.returncode == 7
    assert completed.stderr.splitlines()[0] == "unisono: rank 1 exited with code 7"


def test_run_exits_with_128_plus_signal_when_a_rank_is_killed(script: Script) -> None:
    completed = run("-n", 2, script(f"if rank == 1: os.kill(os.getpid(), 9)\n{FAIL}"), launcher=RUN_PATIENTLY)
    assert completed.returncode == 128 + signal.SIGKILL
    assert completed.stderr.splitlines()[0] == "unisono: rank 1 was killed by SIGKILL"


def test_run_stops_ranks_that_do_not_notice_a_failure(script: Script) -> None:
    completed = run("-n", 3, script(f"if rank == 0: raise ValueError('the cause')\n{WAIT}"))
    assert completed.returncode == 1
    assert "unisono: rank 2 was stopped (SIGTERM)" in completed.stderr


@pytest.mark.parametrize(("transport", "size", "lost"), [("shm", 4, 3), ("tcp", 3, 0)])
def test_training_goes_on_without_a_killed_rank_under_keep_going(transport: str, size: int, lost: int) -> None:
    left = [rank for rank in range(size) if rank != lost]
    completed = run("-n", size, "--keep-going", ELASTIC, "--lose", lost, UNISONO_TRANSPORTS=transport)
    assert completed.returncode == 0, completed.stderr
    steps, losses = completed.stdout.splitlines()
    assert re.fullmatch(rf"\[{left[0]}\] step (59|60): rank {lost} died; {len(left)} ranks go on", steps)
    assert losses.endswith(" in 200 steps, as by a single process")
    loss, summary = completed.stderr.splitlines()
    report = rf"unisono: rank {lost} \(host \S+, pid \d+\) was killed by SIGKILL; {len(left)} other ranks go on"
    assert re.fullmatch(report, loss)
    ranks = ", ".join(map(str, left))
    assert summary == f"unisono: rank {lost} was lost (--keep-going), and ranks {ranks} ended with 0"


@pytest.mark.parametrize(("transport", "size", "lost"), [("shm", 4, 3), ("tcp", 3, 0)])
def test_replacement_joins_the_training_under_max_restarts(transport: str, size: int, lost: int) -> None:
    leader = 0 if lost else 1
    completed = run(
        *("-n", size, "--max-restarts", 1, ELASTIC, "--lose", lost, "--replace"), UNISONO_TRANSPORTS=transport
    )
    assert completed.returncode == 0, completed.stderr
    loss, growth, losses = completed.stdout.splitlines()
    # The lost rank had finished step 59. A rank that still was in that call when it noticed the death reports 59.
    assert re.fullmatch(rf"\[{leader}\] step (59|60): rank {lost} died; {size - 1} ranks go on", loss)
    assert growth == f"[{leader}] step 120: a replacement has joined; {size} ranks go on"
    assert losses.endswith(" in 200 steps, as by a single process")
    report, summary = (line for line in completed.stderr.splitlines() if line.startswith("unisono: rank"))
    assert report.endswith(f"was killed by SIGKILL; {size - 1} other ranks go on, and it is started anew")
    others = ", ".join(str(rank) for rank in range(size) if rank != lost)
    assert summary == f"unisono: rank {lost} ended with 0 after a new start, and ranks {others} ended with 0"


def test_rank_that_fails_before_init_is_started_anew_and_meets_the_others(script: Script, tmp_path: Path) -> None:
    program = script(f"""
        from pathlib import Path
        attempt = Path({str(tmp_path)!r}, f"attempt {{rank}}")
        is_first = not attempt.exists()
        attempt.touch()
        if rank == 1 and is_first: sys.exit(3)
        import unisono as un
        with un.init() as world:
            world.barrier()
            print(world.size, world.epoch)
    """)
    completed = run("-n", 2, "--max-restarts", 1, program)
    assert completed.returncode == 0, completed.stderr
    assert sorted(completed.stdout.splitlines()) == ["[0] 2 0", "[1] 2 0"]


def test_ranks_are_started_anew_as_often_as_max_restarts_allows(script: Script) -> None:
    completed = run("-n", 1, "--max-restarts", 2, script("print(os.environ['UNISONO_RESTART'])\nsys.exit(7)"))
    assert (completed.returncode, completed.stdout) == (7, "[0] 0\n" * 3)
    losses = [line for line in completed.stderr.splitlines() if "pid" in line]
    assert [line.endswith("and it is started anew") for line in losses] == [True, True, False]


def test_replacement_that_no_rank_is_left_to_admit_is_stopped(script: Script) -> None:
    program = script("""
        import time, unisono as un
        world = un.init()
        world.barrier()
        world.barrier()
        if rank == 1: os._exit(3)
        try:
            world.recv(bytearray(1), source=1)
        except un.PeerLostError:
            time.sleep(1)  # the launcher starts no replacement for a rank that ends after all others
            os._exit(0)
    """)
    completed = run("-n", 2, "--max-restarts", 1, program)
    assert completed.returncode == 0, completed.stderr
    _, stopped, summary = completed.stderr.splitlines()
    assert stopped == "unisono: stopped rank 1: no rank was left that could admit a process that joins"
    assert summary == "unisono: rank 1 was lost (--keep-going), and rank 0 ended with 0"


def test_keep_going_exits_with_the_root_cause_when_all_ranks_fail() -> None:
    completed = run("-n", 2, "--keep-going", "--", "sh", "-c", "exit 7")
    *losses, first, then = completed.stderr.splitlines()
    assert completed.returncode == 7
    assert [line.rpartition("; ")[2] for line in losses] == ["1 other rank goes on", "no other rank is running"]
    assert re.fullmatch(r"unisono: rank \d exited with code 7", first)
    assert re.fullmatch(r"unisono: rank \d then exited with code 7", then)


def test_interrupt_ends_a_job_that_goes_on_after_a_loss(script: Script) -> None:
    with started("-n", 2, "--keep-going", script(f"print('ready')\nif rank == 1: sys.exit(3)\n{WAIT}")) as job:
        assert job.stderr is not None
        assert job.stderr.readline().endswith("exited with code 3; 1 other rank goes on\n")
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, errors.count("unisono: ")) == (130, 1)
    assert errors.endswith("[0] KeyboardInterrupt\nunisono: interrupted\n")


def test_syntax_error_of_all_ranks_is_shown_once(script: Script) -> None:
    completed = run("-n", 3, script("never def this"))
    assert completed.returncode == 1
    assert completed.stderr.count("    never def this\n") == 1
    assert "SyntaxError" in completed.stderr


@pytest.mark.parametrize("then", ["", "import time; time.sleep(4); print('goes on')"])
def test_traceback_of_a_rank_that_succeeds_is_ordinary_output(script: Script, then: str) -> None:
    completed = run(
        "-n", 1, script(f"import logging\ntry: 1 / 0\nexcept ZeroDivisionError: logging.exception('note')\n{then}")
    )
    assert completed.returncode == 0
    assert completed.stderr.startswith("[0] ERROR:root:note\n[0] Traceback (most recent call last):\n")
    assert completed.stderr.endswith("[0] ZeroDivisionError: division by zero\n")


def test_faulthandler_dumps_of_all_ranks_are_shown(script: Script) -> None:
    completed = run("-n", 2, script("import faulthandler; faulthandler.dump_traceback(); os._exit(3)"))
    assert completed.returncode == 3
    assert all(f'[{rank}]   File "{script("")}", line 3 in <module>' in completed.stderr for rank in (0, 1))


def test_rendezvous_fails_when_a_rank_exits_before_init(script: Script) -> None:
    program = script("""
        if rank == 1: sys.exit(0)
        from unisono.collectives.bootstrap.environment import detect
        from unisono.transports.rendezvous import open_store
        job = detect(os.environ)
        store = open_store(job.store, "", key=job.key, job=job.job, timeout_s=30.0)
        store.get("what rank 1 would set", 600.0)
    """)
    completed = run("-n", 2, program)
    assert completed.returncode == 1
    assert "RendezvousError: rank 1 exited with code 0 before it called un.init()" in completed.stderr


@pytest.mark.parametrize(
    ("end", "exit_code", "expected"),
    [
        ("raise ValueError('the cause')", 1, "[1] ValueError: the cause"),
        ("os.kill(os.getpid(), 9)", 137, "unisono: rank 1 was killed by SIGKILL"),
        ("sys.exit(0)", 1, "PeerLostError: rank 1 has left"),
    ],
)
def test_ranks_in_a_collective_fail_when_another_rank_ends(
    script: Script, end: str, exit_code: int, expected: str
) -> None:
    program = script(f"""
        import numpy as np
        import unisono as un
        world = un.init()
        world.allreduce(np.ones(8))
        if world.rank == 1: {end}
        world.allreduce(np.ones(8))
    """)
    completed = run("-n", 3, program, launcher=RUN_PATIENTLY)
    assert completed.returncode == exit_code
    assert expected in completed.stderr
    assert completed.stderr.count("Traceback") == (exit_code == 1)
    assert "SIGTERM" not in completed.stderr


def test_an_interrupt_ends_a_collective(script: Script) -> None:
    program = script(f"""
        import numpy as np
        import unisono as un
        world = un.init()
        world.barrier()
        print("ready")
        if world.rank == 1: {WAIT}
        world.allreduce(np.ones(8))
    """)
    with started("-n", 3, program, launcher=RUN_PATIENTLY) as job:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=DEADLINE_S)
    *where, last = errors.splitlines()
    assert (job.returncode, last) == (130, "unisono: interrupted")
    assert [line.partition(" is in ")[0] for line in where] == [f"unisono: rank {rank}" for rank in range(3)]
    assert "rank 1 is in user code" in where[1]


def test_run_reports_an_interrupt_once(script: Script) -> None:
    with started("-n", 3, script(f"print('ready')\n{WAIT}"), launcher=RUN_PATIENTLY) as job:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, errors) == (130, "unisono: interrupted\n")


def test_a_second_interrupt_kills_ranks_that_ignore_the_first(script: Script) -> None:
    program = script(f"""
        import signal
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: print("no"))
        print("ready")
        while True: {WAIT}
    """)
    with started("-n", 2, program) as job:
        assert job.stdout is not None
        job.send_signal(signal.SIGINT)
        assert job.stdout.readline().endswith("no\n")
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_launcher_also_end_the_ranks(script: Script, number: signal.Signals) -> None:
    launcher = handling(number, signal.SIG_DFL)
    with started("-n", 2, script(f"print('ready')\n{WAIT}"), launcher=launcher) as job:
        job.send_signal(number)
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, errors) == (128 + number, f"unisono: stopped by {number.name}\n")


def test_user_signals_reach_only_ranks_that_handle_them(script: Script) -> None:
    program = script("""
        import signal, subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        heard = []
        if rank == 0:
            signal.signal(signal.SIGUSR1, lambda *_: heard.append(print("got it")))
        print("ready")
        if rank == 0:
            while not heard: time.sleep(0.01)  # the signal may have come before a pause
        sys.stdout.write(sys.stdin.read())
        alive = child.poll() is None
        child.kill(), child.wait()
        sys.exit(not alive)
    """)
    with started("-n", 2, program) as job:
        job.send_signal(signal.SIGUSR1)
        out, errors = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, out, errors) == (0, "[0] got it\n", "")


def test_signals_ignored_by_the_launcher_are_ignored_by_ranks(script: Script, tmp_path: Path) -> None:
    end = tmp_path / "end"
    program = script(f"""
        import pathlib, time
        print("ready")
        while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)
        print("the end")
    """)
    with started("-n", 2, program, launcher=ignoring(signal.SIGHUP)) as job:
        job.send_signal(signal.SIGHUP)  # nohup ignores the signal that a closed terminal sends
        for pid in ranks_of(tmp_path):
            os.kill(pid, signal.SIGHUP)
        end.touch()
        out, errors = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, sorted(out.splitlines()), errors) == (0, ["[0] the end", "[1] the end"], "")


def test_exit_codes_are_right_when_launcher_started_with_sigchld_ignored(script: Script) -> None:
    program = script("""
        import subprocess
        code = subprocess.run([sys.executable, "-c", "import sys; sys.exit(3)"]).returncode
        sys.exit(4 + code if rank == 1 else 0)
    """)
    completed = run("-n", 2, program, launcher=ignoring(signal.SIGCHLD))
    assert (completed.returncode, completed.stderr) == (7, "unisono: rank 1 exited with code 7\n")


def test_ranks_start_with_no_signals_blocked_when_the_launcher_blocks_some(script: Script) -> None:
    blocking = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1]);"
    completed = run("-n", 1, script("import signal; print(signal.pthread_sigmask(0, []))"), launcher=preceded(blocking))
    assert completed.stdout == "[0] set()\n"


@pytest.mark.parametrize("lack", ["errno.ENOSYS", "errno.EPERM", ""])
def test_run_notices_exits_without_pidfds(script: Script, lack: str) -> None:
    refuse = (
        f"def refuse(*_): raise OSError({lack}, 'refused')\nos.pidfd_open = refuse" if lack else "del os.pidfd_open"
    )
    completed = run("-n", 2, script("sys.exit(3 * rank)"), launcher=preceded(f"import errno, os\n{refuse}\n"))
    assert (completed.returncode, completed.stderr) == (3, "unisono: rank 1 exited with code 3\n")


def test_run_stops_ranks_after_its_timeout(script: Script) -> None:
    program = script(f"""
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if rank: {WAIT}
    """)
    completed = run("-n", 3, "--timeout", "3", program)
    assert completed.returncode == 124
    # Rank 0 may not have begun when the signal comes.
    assert re.search(r"unisono: stopped after 3 s \(--timeout\): ranks (0, )?1, 2 had not ended\n", completed.stderr)


def test_killed_launcher_takes_its_ranks_with_it(script: Script, tmp_path: Path) -> None:
    with started("-n", 2, script(f"print('ready')\n{WAIT}")) as job:
        assert processes_of(tmp_path)
        job.kill()
        job.communicate(timeout=DEADLINE_S)
    assert eventually(lambda: not processes_of(tmp_path))


def test_run_ends_processes_that_ranks_leave_behind(script: Script, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    program = script(f"import subprocess; subprocess.Popen([sys.executable, '-c', '{WAIT}', {str(marker)!r}])")
    assert run("-n", 2, program).returncode == 0
    assert eventually(lambda: not processes_of(tmp_path))


def test_a_job_outlives_the_reader_of_its_output(script: Script, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    program = script(f"""
        import pathlib, time
        print("ready")
        while not pathlib.Path({str(gone)!r}).exists(): time.sleep(0.01)
        for _ in range(10000): print("nobody reads this")
        print("the end", file=sys.stderr)
        sys.exit(3 * rank)
    """)
    with started("-n", 2, program) as job:
        assert job.stdout is not None
        job.stdout.close()
        gone.touch()
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert sorted(errors.splitlines()) == ["[0] the end", "[1] the end", "unisono: rank 1 exited with code 3"]
    assert job.returncode == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_run_loses_no_line_when_stdout_is_nonblocking(script: Script, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # programs that share the pipe may do so
    program = script("for line in range(3000): print(line, 'x' * 60)")
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([*RUN, "-n", "2", str(program)], stdout=writer, stderr=subprocess.PIPE, env=environ) as job:
        assert eventually(lambda: not select.select([], [writer], [], 0)[1])  # the pipe is full
        os.close(writer)
        with open(reader, "rb") as pipe:
            lines = pipe.read().splitlines()
        assert job.stderr is not None
        assert job.stderr.read() == b""
    assert (job.returncode, len(lines), len(set(lines))) == (0, 6000, 6000)


def test_run_timeout_holds_while_nobody_reads_the_output(script: Script, tmp_path: Path) -> None:
    command = [*RUN, "-n", "2", "--timeout", "2", str(script("while True: print('x' * 1000)"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert eventually(lambda: len(ranks_of(tmp_path)) == 2)
        assert eventually(lambda: not ranks_of(tmp_path))
        assert job.poll() is None
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 124
    assert errors.endswith(b"unisono: stopped after 2 s (--timeout): ranks 0, 1 had not ended\n")


def test_run_fails_and_says_why_when_output_cannot_be_written(script: Script) -> None:
    with open("/dev/full", "wb") as full:
        command = [*RUN, "-n", "1", str(script("print('lost'); print('kept', file=sys.stderr)"))]
        completed = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    message = "unisono: lines of ranks are missing, because stdout could not be written: No space left on device"
    assert (completed.returncode, completed.stderr) == (1, f"[0] kept\n{message}\n")


def test_job_runs_with_all_standard_streams_closed(script: Script, tmp_path: Path) -> None:
    program = script(f"""
        import pathlib
        import unisono as un
        with un.init() as world:
            world.barrier()
        pathlib.Path({str(tmp_path)!r}, f"done {{rank}}").touch()
        print("nobody reads this")
        sys.exit(3 * rank)
    """)
    completed = run("-n", 2, program, launcher=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *RUN))
    assert (completed.returncode, len(list(tmp_path.glob("done *")))) == (3, 2)


def test_run_leaves_no_temporary_files(script: Script, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert run("-n", 2, script("print('done')"), TMPDIR=str(temporary)).returncode == 0
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0", "{script}"], "'0' is not a positive number of ranks"),
        (["-n", "-2", "{script}"], "'-2' is not a positive number of ranks"),
        (["-n", "two", "{script}"], "'two' is not a positive number of ranks"),
        (["-n", "99999999999999999999", "{script}"], "is not a positive number of ranks"),
        (["-n", "99999999", "{script}"], "open files"),
        (["{script}"], "how many ranks? Write -n RANKS"),
        (["-n", "2", "--env", "=1", "{script}"], "'=1' is not NAME=VALUE"),
        (["-n", "2", "--env", "NO_SUCH_NAME", "{script}"], "nor the name of a variable that is set here"),
        (["-n", "2", "--hosts", "a:3", "{script}"], "places 3, and -n says 2 ranks"),
        (["--hosts", "a,a", "{script}"], "names 'a' twice"),
        (["--hosts", "a:0", "{script}"], "write hosts and their numbers of ranks"),
        (["--hosts", "-oProxyCommand=x", "{script}"], "write hosts and their numbers of ranks"),
        (["--hosts", "a", "--ssh", "absent-ssh -4", "{script}"], "there is no executable 'absent-ssh -4'"),
        (["--hosts", "a", "--max-restarts", "1", "{script}"], "on one machine only"),
        (["-n", "1", "--hosts", "a", "--nnodes", "2", "{script}"], "choose one"),
        (["-n", "1", "--nnodes", "2", "--node-rank", "2", "{script}"], "must be less than --nnodes 2"),
        (["-n", "1", "--nnodes", "2", "{script}"], "--nnodes needs --node-rank"),
        (["-n", "1", "--nnodes", "2", "--node-rank", "0", "{script}"], "--nnodes needs --store"),
        (["-n", "1", "--nnodes", "2", "--node-rank", "0", "--store", "tcp://127.0.0.1:1", "{script}"], "needs a key"),
        (["-n", "1", "--nnodes", "2", "--node-rank", "0", "--store", "tcp://a:0", "{script}"], "must know the port"),
        (["-n", "1", "--nnodes", "0", "{script}"], "'0' is not a positive number of machines"),
        (["-n", "1", "--ssh", "ssh -4", "{script}"], "--ssh belongs to --hosts"),
        (["--hosts", "a", "--ssh", "ssh 'x", "{script}"], "no closing quotation"),
        (["-n", "1", "--store", "tcp://127.0.0.1:29400", "{script}"], "belong to --nnodes"),
        (["-n", "2"], "Missing argument 'PROGRAM...'"),
        (["-n", "2", "absent.py"], "there is no file 'absent.py'"),
        (["-n", "2", "{folder}"], "is a directory"),
        (["-n", "2", "/etc/hostname"], "'/etc/hostname' is not a Python file"),
        (["-n", "2", "echo", "hello"], "put -- before it"),
        (["-n", "2", "-m", "absent_module"], "there is no module 'absent_module'"),
        (["-n", "2", "--", "absent-executable"], "there is no executable 'absent-executable'"),
        (["-n", "2", "--bind", "socket", "{script}"], "'socket' is not one of 'none', 'core', 'numa'"),
        (["-n", "2", "--timeout", "nan", "{script}"], "'nan' is not a positive number of seconds"),
        (["-n", "2", "--max-restarts", "-1", "{script}"], "'-1' is not a number of restarts"),
        (["-n", "2", "--bogus", "{script}"], "No such option"),
    ],
)
def test_run_refuses_bad_arguments_in_one_line_before_starting_ranks(
    script: Script, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    places = {"script": script("print('started')"), "folder": tmp_path}
    completed = run(*(argument.format(**places) for argument in arguments))
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert re.fullmatch(f"unisono: .*{re.escape(complaint)}.*\n", completed.stderr)


def test_run_refuses_a_bad_setting_before_starting_ranks(script: Script) -> None:
    completed = run("-n", 2, script("print('started')"), UNISONO_TIMEOUT_S="soon")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith("unisono: UNISONO_TIMEOUT_S='soon' cannot be used")


def test_only_rank_0_warns_of_an_unknown_unisono_variable(script: Script) -> None:
    completed = run("-n", 2, script("import unisono; unisono.init().close()"), UNISONO_LOGG="info")
    assert (completed.returncode, completed.stdout) == (0, "")
    assert completed.stderr.startswith("[0] unisono [0/2] UNISONO_LOGG is not a setting")
    assert completed.stderr.count("\n") == 1


def test_log_option_of_run_reaches_the_ranks(script: Script) -> None:
    assert run("-n", 1, "--log", "info", script("print(os.environ['UNISONO_LOG'])")).stdout == "[0] info\n"


CALLS = """
import numpy as np, unisono as un
with un.init() as world:
    x = np.ones(4, "float32")
    world.allreduce(x)
    world.allreduce(x)
    world.send(x, 1) if world.rank == 0 else world.recv(x, un.ANY_SOURCE) if world.rank == 1 else None
"""


def test_info_log_describes_the_job_once_in_at_most_12_lines(script: Script) -> None:
    completed = run("-n", 3, script(CALLS), UNISONO_LOG="info", UNISONO_TRANSPORTS="tcp")
    assert (completed.returncode, completed.stdout) == (0, "")
    lines = completed.stderr.splitlines()
    assert len(lines) <= 12
    assert all(line.startswith("[0] unisono [0/3] ") for line in lines)
    for fact in (
        "3 ranks on one host met in",
        "ranks 0-2 may use",
        "transports: tcp (asked for) within a host",
        "security: The launcher made this job's key",
        "options: log='info', transports='tcp'",
        f"Python {sys.version.split()[0]}, unisono",
    ):
        assert fact in completed.stderr


def test_debug_log_of_calls_shows_when_each_begins_and_nothing_of_links(script: Script) -> None:
    completed = run("-n", 2, script(CALLS), UNISONO_LOG="debug:calls")
    assert completed.returncode == 0
    allreduce = r"unisono \[1/2\] \d\d:\d\d:\d\d\.\d{3} allreduce\(float32\[4\], op=sum\) "
    assert len(re.findall(allreduce + "begins", completed.stderr)) == 2
    assert len(re.findall(allreduce + r"took [\d.]+ us", completed.stderr)) == 2
    assert "send of float32[4] to rank 1 with tag 0 starts" in completed.stderr
    assert "recv of float32[4] from any rank with tag 0 starts" in completed.stderr
    assert "channel" not in completed.stderr

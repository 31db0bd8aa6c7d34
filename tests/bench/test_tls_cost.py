import json
import subprocess
import sys


def test_cost_of_tls_is_measured_for_each_size():
    command = [sys.executable, "-m", "unisono.bench.programs.tls", "--sizes", "8,64K", "--rounds", "2", "--json"]
    rows = json.loads(subprocess.check_output(command, timeout=100))
    assert [row["nbytes"] for row in rows] == [8, 65536]
    assert all(0 < row["best_on_s"] <= row["on_s"] and 0 < row["best_off_s"] <= row["off_s"] for row in rows)

"""Keras programs for one process that train data-parallel without a change, on each backend."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="make keras and make tensorflow install it and run these tests"
)
PROGRAM = Path(__file__).parents[2] / "examples" / "single_process" / "keras_classifier.py"
# Keras imports TensorFlow on each backend if it is installed. So that environment is for that backend only.
BACKENDS = ["tensorflow"] if importlib.util.find_spec("tensorflow") is not None else ["torch", "jax"]


def run(backend: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    quiet = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ = {**os.environ, **quiet, "KERAS_BACKEND": backend}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def loss_of(output: str) -> float:
    result = re.search(r"^(?:\[0\] )?loss ([\d.]+)$", output, re.MULTILINE)
    assert result, output
    return float(result[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_unchanged_keras_program_reaches_the_loss_of_one_process(backend: str, tmp_path: Path) -> None:
    alone = run(backend, tmp_path, str(PROGRAM))
    words = ("-m", "unisono", "run", "-n", "2", "--data-parallel", str(PROGRAM), "--batch-size", "32")
    together = run(backend, tmp_path, *words)
    assert together.returncode == 0, together.stderr
    assert loss_of(together.stdout) == pytest.approx(loss_of(alone.stdout), abs=1e-4)
    for words_of_report in (
        "SGD averages gradients over 2 ranks",
        "fit gives each of 2 ranks its share of 512 samples",
    ):
        assert words_of_report in together.stderr
    assert "[1]" not in together.stdout


CHECKPOINTS = """
import keras, numpy, os
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = numpy.ones((8, 2), "float32")
callbacks = [keras.callbacks.ModelCheckpoint("at_{epoch}.weights.h5", save_weights_only=True)]
model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=callbacks)
model.load_weights("at_2.weights.h5")
print("loss", round(model.evaluate(x, x[:, :1], verbose=0), 6))
"""


def test_checkpoints_are_written_while_fit_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHECKPOINTS)
    completed = run(BACKENDS[0], tmp_path, "-m", "unisono", "run", "-n", "2", "--data-parallel", "train.py")
    assert completed.returncode == 0, completed.stderr
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["at_1.weights.h5", "at_2.weights.h5"]


GENERATOR = """
import keras, numpy
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
def batches():
    while True:
        yield numpy.ones((4, 2)), numpy.ones((4, 1))
model.fit(batches(), steps_per_epoch=2)
"""


def test_generator_is_refused_with_the_line_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GENERATOR)
    completed = run(BACKENDS[0], tmp_path, "-m", "unisono", "run", "-n", "2", "--data-parallel", "train.py")
    assert completed.returncode != 0
    assert (
        "train.py:8: --data-parallel cannot train this program: fit takes samples of type generator" in completed.stderr
    )


BATCHES = """
import keras, numpy
keras.utils.set_random_seed(1)
x = numpy.arange(36, dtype="float32").reshape(18, 2) / 36
class Batches(keras.utils.PyDataset):
    def __init__(self, size, count):
        super().__init__()
        self.size, self.count, self.epochs = size, count, 0
    def __len__(self):
        return self.count
    def __getitem__(self, number):
        part = slice(number * self.size, (number + 1) * self.size)
        return x[part], x[part, :1]
    def on_epoch_end(self):
        self.epochs += 1
class Endless(Batches):
    num_batches = None
    __len__ = None
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(0.1), "mse")
batches = Batches(4, 5)
model.fit(batches, epochs=2, shuffle=False, verbose=0)
assert batches.epochs >= 2, "on_epoch_end was not called"
print(f"loss {model.evaluate(x, x[:, :1], verbose=0):.6f}")
model.fit(Endless(4, 5), verbose=0)
"""


def test_batches_of_a_py_dataset_are_shared_and_endless_ones_refused(tmp_path: Path) -> None:
    if BACKENDS == ["tensorflow"]:
        pytest.skip("make keras runs it")
    (tmp_path / "train.py").write_text(BATCHES)
    together = run("torch", tmp_path, "-m", "unisono", "run", "-n", "2", "--data-parallel", "train.py")
    assert "its share of 4 batches" in together.stderr
    assert "its dataset has no known length" in together.stderr
    # Two batches of 4 in each step are a batch of 8. The last column is for the bias.
    x = np.concatenate([np.arange(36).reshape(18, 2) / 36, np.ones((18, 1))], 1)
    weights = np.zeros(3)
    for part in 2 * [x[:8], x[8:16]]:
        weights -= 0.1 * 2 * (part @ weights - part[:, 0]) @ part / 8
    assert loss_of(together.stdout) == pytest.approx(np.mean((x @ weights - x[:, 0]) ** 2), abs=1e-5)


DATASET = """
import keras, numpy, tensorflow as tf
keras.utils.set_random_seed(1)
x = numpy.arange(36, dtype="float32").reshape(18, 2) / 36
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).take(4), verbose=0)
print(f"loss {model.evaluate(x, x[:, :1], verbose=0):.6f}")
"""


def test_batches_of_a_dataset_are_shared(tmp_path: Path) -> None:
    if BACKENDS != ["tensorflow"]:
        pytest.skip("make tensorflow runs it")
    (tmp_path / "train.py").write_text(DATASET)
    together = run("tensorflow", tmp_path, "-m", "unisono", "run", "-n", "2", "--data-parallel", "train.py")
    assert "its share of 4 batches" in together.stderr
    # Two batches of 4 in each step are a batch of 8.
    (tmp_path / "train.py").write_text(DATASET.replace("batch(4).take(4)", "batch(8).take(2)"))
    assert loss_of(together.stdout) == pytest.approx(loss_of(run("tensorflow", tmp_path, "train.py").stdout), abs=1e-5)

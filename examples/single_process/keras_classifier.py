"""Classifies points by a small model of Keras, on any of its backends."""

import argparse

import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint", default="classifier.weights.h5")
options = parser.parse_args()

keras.utils.set_random_seed(6)
points = np.random.default_rng(6).standard_normal((768, 8)).astype("float32")
classes = ((points[:, :4] ** 2).sum(1) > (points[:, 4:] ** 2).sum(1)).astype("int32")

model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2, activation="softmax")]
)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    points[:512],
    classes[:512],
    batch_size=options.batch_size,
    epochs=options.epochs,
    shuffle=False,
    verbose=2,
    validation_data=(points[512:], classes[512:]),
)
model.save_weights(options.checkpoint)
model.load_weights(options.checkpoint)
loss = model.evaluate(points[512:], classes[512:], verbose=0)[0]
print(f"loss {loss:.6f}")

"""A process of `SwarmProcesses` that trains by Keras with `DiLoCo`; the backend is that of the environment.

"a" begins with a step of its optimizer. The others get weights and moments from it, in a call of `state`.
"""

PROGRAM = """
import warnings
warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")  # of variables on torch
import keras
import unisono.keras as uk
from unisono.data_parallel import fingerprint

keras.utils.set_random_seed(ord(name))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), loss="mean_squared_error")
x = np.random.default_rng(ord(name)).normal(size=(64, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
state = {"model": model, "optimizer": model.optimizer}

def described():
    variables = [*model.weights, *model.optimizer.variables]
    return fingerprint({str(index): np.array(variable.numpy()) for index, variable in enumerate(variables)})

class Marks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark(f"{name} with {len(swarm.members)}")
        time.sleep(0.02)

with un.Swarm(places, **settings) as swarm:
    if name == "a":
        model.fit(x, y, batch_size=8, verbose=0)
    else:
        try:
            swarm.state(state, 0)
        except un.UsageError as error:
            print(error)
        model.optimizer.build(model.trainable_variables)
    shared = swarm.state(state, 8 if name == "a" else 0)
    assert shared.revision == 8
    print("state", described())
    mark(f"{name} has it")
    while swarm.size < 2:
        time.sleep(0.01)
    swarm.barrier()
    before = float(model.evaluate(x, y, verbose=0))
    outer = uk.DiLoCo(comm=swarm, steps=60, inner_steps=4, fragments=2, overlap=1, mixing=0.5, compression="int8")
    model.fit(x, y, batch_size=8, epochs=1000, verbose=0, callbacks=[outer, Marks()])
    after = float(model.evaluate(x, y, verbose=0))
    assert (outer.outer.steps, after < before / 2) == (60, True), (outer.outer.steps, before, after)
    print("trained", fingerprint({str(index): variable for index, variable in enumerate(model.trainable_variables)}))
    mark(f"{name} ends")
    await_mark("a ends", "b ends")
"""

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

# "a" and "b" train the parameters of the Keras model of "c" by numpy. "c" is stopped until they have left it behind.
# The bias of the outer parameters tells all members to end after the same step.
AGAIN = """
import warnings
from unisono.data_parallel import DiLoCo, fingerprint

ids = set()
arguments = dict(inner_steps=4, fragments=1, overlap=1, mixing=0.5, compression="int8")

def must_end(outer):
    ids.add(swarm.me.id)
    members = ",".join(sorted(member.name for member in swarm.members))
    for count in range(1, len(ids) + 1):
        mark(f"{name} with {members} {count}")
    time.sleep(0.01)
    return outer.steps % 4 == 1 and outer._values[0][-1] > 500.0

def train_by_keras():
    import keras
    import unisono.keras as uk

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not self.model.stop_training and must_end(outer.outer):
                self.model.stop_training = True

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), loss="mean_squared_error")
    outer = uk.DiLoCo(comm=swarm, steps=10**9, **arguments)
    x = np.ones((64, 4), np.float32)
    model.fit(x, x[:, :1], batch_size=8, epochs=10**9, verbose=0, callbacks=[outer, Marks()])
    return outer.outer.steps, {str(index): each for index, each in enumerate(model.trainable_variables)}

def train_by_numpy():
    model = {"layer 0.0": np.zeros((4, 1), np.float32), "layer 0.1": np.zeros(1, np.float32)}
    with DiLoCo(swarm, model, **arguments) as outer:
        while not must_end(outer):
            model["layer 0.1"] += 1000.0 * has_mark(folder, "stop")
            outer.step(model)
        return outer.steps, {str(index): each for index, each in enumerate(outer.synchronize(model).values())}

warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")  # of variables on torch
(folder / f"process of {name}").write_text(str(os.getpid()))
if name == "c":
    import keras  # which takes longer than the others wait
with un.Swarm(places, **settings) as swarm:
    steps, model = train_by_keras() if name == "c" else train_by_numpy()
    print("trained", steps, fingerprint(model))
    mark(f"{name} ends")
    await_mark("a ends", "b ends", "c ends")
"""

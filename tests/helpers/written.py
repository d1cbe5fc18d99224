"""Models of each kind, and files of weights as other libraries write them."""

import json
import pathlib

import ml_dtypes
import numpy as np

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64"}


def write_safetensors(path, tensors, header=None):
    """Writes what the library `safetensors` does: the length of a header, the header, the numbers."""
    told, at = {}, 0
    for name, tensor in tensors.items():
        told[name] = {
            "dtype": TYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(told if header is None else header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    numbers = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    return str(path)


def write_shards(folder, tensors, count=2):
    """Writes files of safetensors and their index; returns the path of the index."""
    names, places = list(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        own = names[number::count]
        write_safetensors(folder / file, {name: tensors[name] for name in own})
        places |= dict.fromkeys(own, file)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return str(path)


def block(keras):
    class Block(keras.layers.Layer):
        """Layers in an attribute, a list and a dict, and variables of its own."""

        def __init__(self, units, **settings):
            super().__init__(**settings)
            self.units = units
            self.first = keras.layers.Dense(units, name="in")
            self.rest = [keras.layers.Dense(units), keras.layers.Dense(units)]
            self.by_name = {"last": keras.layers.Dense(units, name="out")}

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale", initializer="ones")
            self.moving = self.add_weight(shape=(shape[-1],), name="moving", trainable=False)
            super().build(shape)

        def call(self, x):
            x = self.first(x * self.scale)
            for layer in self.rest:
                x = layer(x)
            return self.by_name["last"](x)

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    return Block


def sequential(keras):
    layers = keras.layers
    return keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4), layers.BatchNormalization()])


def functional(keras):
    layers = keras.layers
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="encoder")(inputs)
    x = layers.Dropout(0.5)(block(keras)(4, name="block")(layers.Dense(5)(x)))
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(3)], name="inner")
    return keras.Model(inputs, inner(layers.BatchNormalization()(x)))


def subclassed(keras):
    Block = block(keras)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.layers.Dense(4)
            self.blocks = [Block(4), Block(4)]
            self.z_head = keras.layers.Dense(4)  # which Keras finds after `layers`

        def call(self, x):
            x = self.encoder(x)
            for each in self.blocks:
                x = each(x)
            return self.z_head(x)

    model = Model()
    model(np.zeros((1, 4), np.float32))
    return model


def filled(model, seed=0):
    """Returns a model with random weights, of which no two are equal."""
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=value.shape).astype(value.dtype) for value in model.get_weights()])
    return model


def same(one, other):
    """Asserts that two models have equal weights, bit by bit."""
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def by_path(model):
    """The weights of a model by the names that Keras gives them, without that of the model."""
    names = [getattr(one, "path", one.name).removesuffix(":0") for one in model.weights]
    values = dict(zip(names, model.get_weights()))
    return {name.removeprefix(f"{model.name}/"): value for name, value in values.items() if "seed" not in name}


def bfloat16(value):
    return np.asarray(value).astype(ml_dtypes.bfloat16)

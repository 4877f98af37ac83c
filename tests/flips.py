"""Flips a bit in the copy that one device has of an array, or in a file."""

import jax
import numpy as np


def flip(array, device, bit=0, element=-1):
    """Flips one bit of an element in the buffer of the device with this number, if it is here."""
    shards = []
    for shard in array.addressable_shards:
        own = np.array(shard.data)
        if shard.device.id == device:
            as_bytes = own.reshape(-1).view(np.uint8)
            as_bytes[element * own.itemsize + bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(own, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip_byte(file, offset=0):
    """Flips one bit of the byte at an offset of a file."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def flip_after(training, step, number):
    """Makes a class of training flip a bit after the metrics of a step.

    It is of the first parameter, on the local device of this number.
    """
    record = training._record_step

    def record_and_flip(self, pending):
        went_back = record(self, pending)
        if pending.step == step:
            params = self.progress.state.params
            leaves, structure = jax.tree.flatten(params)
            leaves[0] = flip(leaves[0], jax.local_devices()[number].id)
            params.update(jax.tree.unflatten(structure, leaves))
        return went_back

    training._record_step = record_and_flip

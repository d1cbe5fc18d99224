"""The arithmetic of a training step, and the share of the device's peak that a training reaches."""

import dataclasses
import functools
import time

_ENOUGH, _TIMES, _LARGEST = 0.005, 4, 8192  # seconds of a product, products of each size, rows


@dataclasses.dataclass(frozen=True)
class Speed:
    """How much a training computes.

    Attributes:
      flops_per_step: floating-point operations of a step on all replicas: those of products of matrices and
        convolutions, forward and backward.
      dtype: in which most of them are computed.
      peak: operations a second of the devices in products of large matrices; None until it is measured.
      share_of_peak: share of them that the training reached, with the time in which it waited for its data; None until
        the training has ended.
    """

    flops_per_step: int
    dtype: str
    peak: float | None = None
    share_of_peak: float | None = None

    def after(self, steps_per_second: float, device: str, devices: int) -> "Speed":
        """Returns the speed of a training that has ended, and measures the peak if that was not done.

        Args:
          steps_per_second: of the training.
          device: the name of one of its devices.
          devices: how many such devices there are on all workers.
        """
        peak = devices * measured_peak(device, self.dtype)
        return dataclasses.replace(self, peak=peak, share_of_peak=self.flops_per_step * steps_per_second / peak)

    def __str__(self) -> str:
        text = f"a step takes {_short(self.flops_per_step)}FLOPs"
        if self.share_of_peak is None:
            return text
        share = f"{100 * self.share_of_peak:.2g}%" if self.share_of_peak >= 0.001 else "<0.1%"
        return f"{text}, {share} of the measured peak ({_short(self.peak)}FLOPs a second, {self.dtype})"


@functools.cache
def measured_peak(device: str, dtype: str) -> float:
    """Measures the floating-point operations a second of a product of matrices; once in a process, in about 0.1 s.

    Args:
      device: the name of the device, such as "CPU:0".
      dtype: the name of the dtype.
    """
    import tensorflow as tf  # here, because tools that read what was measured start without it

    size, seconds = 128, 0.0
    while seconds < _ENOUGH and size < _LARGEST:
        size, taken = 2 * size, []
        with tf.device(device):
            # Not random: to draw the numbers would take longer than the products.
            matrix = tf.cast(tf.reshape(tf.range(size * size) % 7 - 3, [size, size]), dtype)
            for _ in range(_TIMES):
                started = time.perf_counter()
                tf.matmul(matrix, matrix)[0, 0].numpy()  # waits for a GPU
                taken.append(time.perf_counter() - started)
        seconds = min(taken)
    return 2 * size**3 / seconds


def _short(number: float) -> str:
    """Returns a number with a prefix, such as "45.8 M"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"

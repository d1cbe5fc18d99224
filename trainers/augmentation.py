"""Random changes of images that depend on the seeds of examples alone."""

import functools

import keras
import tensorflow as tf


def two_views(images: tf.Tensor, seeds: tf.Tensor, strength: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Turns, scales, shears and shifts images at random and adds noise, twice for each image.

    Args:
      images: float32 `[b, height, width, 1]`.
      seeds: int32 `[b, 2]`, one for each image, which alone decides its views.
      strength: scales all changes; 0 leaves the images unchanged.

    Returns:
      Two float32 tensors of the images' shape.
    """
    height, width = images.shape[1:3]
    draw = functools.partial(tf.random.stateless_uniform, [2, 6 + height * width], minval=-1, maxval=1)
    draws = strength * tf.map_fn(draw, seeds, fn_output_signature=tf.float32)

    def view(draws: tf.Tensor) -> tf.Tensor:
        angle, x_scale, y_scale, shear, x_shift, y_shift = tf.unstack(draws[:, :6], axis=1)
        cos, sin = tf.cos(0.35 * angle), tf.sin(0.35 * angle)
        a, b = (1 + 0.2 * x_scale) * cos, 0.2 * shear - sin
        c, d = sin, (1 + 0.2 * y_scale) * cos
        x, y = (width - 1) / 2, (height - 1) / 2  # the center, which shifts alone move
        zero = tf.zeros_like(a)
        rows = [a, b, x - a * x - b * y + x_shift, c, d, y - c * x - d * y + y_shift, zero, zero]
        moved = keras.ops.image.affine_transform(images, tf.stack(rows, axis=1), data_format="channels_last")
        return moved + 0.2 * tf.reshape(draws[:, 6:], tf.shape(images))

    return view(draws[:, 0]), view(draws[:, 1])

"""Experiments of Model Garden's projects, small enough to train in seconds on two cores, without random augmentation.

Importing this registers them. The names of those that no project registers begin with the experiment that they vary.
"""

import dataclasses
import types

import numpy as np
import tensorflow as tf
import text_data
import text_experiments
import vision_data
import vision_experiments
from experiment import Experiment, merged
from official.core import config_definitions, exp_factory
from official.nlp.data import dual_encoder_dataloader
from official.nlp.tasks import dual_encoder
from official.projects.bigbird import experiment_configs as _bigbird  # noqa: F401
from official.projects.detr.configs import detr as _detr  # noqa: F401
from official.projects.detr.tasks import detection as _detection  # noqa: F401
from official.projects.maxvit import registry_imports as _maxvit  # noqa: F401
from official.projects.movinet.configs import movinet as _movinet  # noqa: F401
from official.projects.movinet.modeling import movinet as _movinet_backbone  # noqa: F401
from official.projects.movinet.modeling import movinet_model as _movinet_model  # noqa: F401
from official.projects.qat.nlp import registry_imports as _qat_nlp  # noqa: F401
from official.projects.qat.vision import registry_imports as _qat_vision  # noqa: F401
from official.projects.volumetric_models import registry_imports as _volumetric  # noqa: F401
from official.projects.yolo.common import registry_imports as _yolo  # noqa: F401
from official.projects.yolo.ops import loss_utils

from trainers import small_data

STEPS = 4
_RESNET = {"resnet": {"model_id": 10, "depth_multiplier": 0.25}}
_MOBILENET = {"mobilenet": {"filter_size_scale": 0.25}}
_SIZE = 64
_PLAIN_SCALES = {"aug_rand_hflip": False, "aug_scale_min": 1.0, "aug_scale_max": 1.0}
# Some pipelines crop at random wherever they are read for training.
_READ_AS_FOR_EVALUATION = {"is_training": False}
# A rate of zero at the end would make any resumed run equal.
_RATES_ABOVE_ZERO = {"learning_rate": {kind: {"decay_steps": 10} for kind in ("cosine", "polynomial")}}


def _small(experiment: Experiment, task=None, optimizer=None) -> Experiment:
    """An experiment with further overrides, trained for STEPS steps that are all reported, with a save in the middle."""
    trainer = {
        "train_steps": STEPS, "steps_per_loop": 1, "summary_interval": 1, "checkpoint_interval": STEPS // 2,
        "validation_interval": STEPS, "best_checkpoint_export_subdir": "",
    }  # fmt: skip
    changes = {"task": task or {}, "trainer": {**trainer, "optimizer_config": optimizer or {}}}
    return dataclasses.replace(experiment, overrides=lambda paths: merged(experiment.overrides(paths), changes))


def _encoded(kind, **encoder):
    """bert/sentence_prediction with another encoder."""

    def overrides(paths):
        whole = text_experiments.TEXT["bert/sentence_prediction"].overrides(paths)
        sizes = {key: paths["vocab_size"] if value is None else value for key, value in encoder.items()}
        whole["task"]["model"]["encoder"] = {"type": kind, kind: sizes}
        return whole

    base = exp_factory.get_exp_config
    return Experiment(text_data.sentence_prediction, overrides, lambda: base("bert/sentence_prediction"))


def _dual_encoder():
    def make_data(directory):
        paths = text_data.sentence_prediction(directory)
        sentences = [sentence for sentence, _ in text_data.sentences()]
        for split, part in (("train", sentences[:48]), ("validation", sentences[48:66])):
            pairs = [text.split(maxsplit=len(text.split()) // 2) for text in part]
            examples = [
                {"left_input": small_data.bytes_feature(" ".join(pair[:-1])),
                 "right_input": small_data.bytes_feature(pair[-1])}
                for pair in pairs
            ]  # fmt: skip
            small_data.write_records(paths[split], examples)
        return paths

    def base():
        data = dual_encoder_dataloader.DualEncoderDataConfig
        task = dual_encoder.DualEncoderConfig(train_data=data(), validation_data=data(is_training=False))
        return config_definitions.ExperimentConfig(
            task=task, trainer=exp_factory.get_exp_config("bert/sentence_prediction").trainer
        )

    def overrides(paths):
        data = text_experiments._data(paths, vocab_file=paths["vocab"], seq_length=text_data.SEQ_LENGTH)
        model = {"encoder": text_experiments.encoder(paths), "max_sequence_length": text_data.SEQ_LENGTH}
        return text_experiments.whole({"model": {**model, "eval_top_k": (1, 2)}, **data})

    return Experiment(make_data, overrides, base)


def _of_text(name, model=None):
    """An experiment of a project that varies one of BERT's: its data, and its own model."""
    kind = name.split("/")[-1].removesuffix("_qat")
    like = {"glue": "bert/sentence_prediction", "squad": "bert/squad", "pretraining": "bert/pretraining"}.get(
        kind, kind
    )
    experiment = text_experiments.TEXT[like]

    def overrides(paths):
        whole = experiment.overrides(paths)
        if model:
            whole["task"]["model"] = merged(whole["task"]["model"], model(paths))
            whole["task"]["model"]["encoder"].pop("bert", None)
        return whole

    return Experiment(experiment.make_data, overrides)


def _bigbird_model(paths):
    sizes = {**text_experiments._BERT, "vocab_size": paths["vocab_size"], "num_rand_blocks": 1, "block_size": 4}
    return {"encoder": {"type": "bigbird", "bigbird": sizes}}


class _TensorFlowOfDevices(types.ModuleType):
    """TensorFlow as the losses of YOLO need it: updates at the index -1 are left out, as on GPUs; CPUs refuse them."""

    def __getattr__(self, name):
        return getattr(tf, name)

    @staticmethod
    def tensor_scatter_nd_update(tensor, indices, updates):
        kept = tf.reduce_all(indices >= 0, axis=-1)
        return tf.tensor_scatter_nd_update(tensor, tf.boolean_mask(indices, kept), tf.boolean_mask(updates, kept))

    @staticmethod
    def tensor_scatter_nd_max(tensor, indices, updates):
        kept = tf.reduce_all(indices >= 0, axis=-1)
        return tf.tensor_scatter_nd_max(tensor, tf.boolean_mask(indices, kept), tf.boolean_mask(updates, kept))


loss_utils.tf = _TensorFlowOfDevices("tensorflow")


def _yolo_detector(backbone, max_level=5, boxes=9, parser=None):
    """A detector of the YOLO project."""
    plain = {
        "random_flip": False, "aug_rand_saturation": 0.0, "aug_rand_brightness": 0.0, "aug_rand_hue": 0.0,
        "aug_rand_translate": 0.0, "max_num_instances": 8, "mosaic": {"mosaic_frequency": 0.0, "mixup_frequency": 0.0},
    }  # fmt: skip

    def overrides(paths):
        model = {"num_classes": vision_data.NUM_SCENE_CLASSES, "input_size": [_SIZE, _SIZE, 3], "backbone": backbone}
        model |= {
            "detection_generator": {"max_boxes": 10, "pre_nms_points": 50},
            "norm_activation": vision_experiments._NORM,
        }
        decoder = {"decoder": {"simple_decoder": {"coco91_to_80": False}}}
        return vision_experiments._run(
            paths,
            {"model": model, "annotation_file": paths["annotations"], "init_checkpoint": ""},
            2,
            {**decoder, "parser": merged(plain, parser or {})},
            {**decoder, "parser": {"max_num_instances": 8}},
            {"optimizer": {"sgd_torch": {"warmup_steps": 2}}, "ema": {"dynamic_decay": False, "average_decay": 0.5}},
        )

    return Experiment(vision_data.write_scenes, overrides)


def _transformer_detector():
    def overrides(paths):
        model = {
            "num_classes": vision_data.NUM_SCENE_CLASSES, "input_size": [_SIZE, _SIZE, 3], "num_queries": 100,
            "hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "backbone": _RESNET,
        }  # fmt: skip
        task = {"model": model, "annotation_file": paths["annotations"], "init_checkpoint": ""}
        read = {"dtype": "float32"}
        return vision_experiments._run(paths, task, 2, read, read, {})

    return Experiment(vision_data.write_scenes, overrides)


def _volumes():
    """Cubes with a ball of one of two kinds."""
    size = 16

    def make(i):
        rng = np.random.default_rng(i)
        places = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"), axis=-1)
        inside = np.linalg.norm(places - rng.integers(4, size - 4, size=3), axis=-1) < 4
        image = inside[..., None] + rng.normal(scale=0.1, size=[size, size, size, 2])
        labels = np.stack([~inside, inside], axis=-1)
        features = {
            "image/encoded": image.astype("float32").tobytes(),
            "image/class/label": labels.astype("float32").tobytes(),
        }
        return tf.train.Example(features=vision_data._features(features))

    def overrides(paths):
        data = {"input_size": [size] * 3, "num_classes": 2, "num_channels": 2}
        model = {"input_size": [size] * 3, "backbone": {"unet_3d": {"base_filters": 4}}}
        rate = {"learning_rate": {"constant": {"learning_rate": 0.001}}}
        return vision_experiments._run(paths, {"model": model}, 2, data, data, rate)

    return Experiment(lambda directory: vision_data._write(directory, 8, 5, make), overrides)


def _plain_images(experiment, train_data=None, **task):
    plain = {
        "aug_rand_hflip": False,
        "aug_crop": False,
        "aug_type": None,
        "random_erasing": None,
        "mixup_and_cutmix": None,
    }
    return _small(experiment, {"train_data": {**plain, **(train_data or {})}, **task}, _RATES_ABOVE_ZERO)


_MAXVIT = {
    "type": "maxvit",
    "maxvit": {
        "stem_hsize": [8, 8], "block_type": ["maxvit"] * 4, "num_blocks": [1] * 4, "hidden_size": [8] * 4,
        "window_size": 1, "grid_size": 1, "head_size": 4, "scale_ratio": None,
        # It drops paths by tf.random in the step, whose state no checkpoint has.
        "survival_prob": 1.0, "dropatt": 0.0, "dropcnn": 0.0, "dropout": 0.0,
    },
}  # fmt: skip


def _moving():
    """Videos for a network that has no grouped 3D convolutions, which CPUs refuse, and drops no paths by tf.random."""
    movinet = {"conv_type": "2plus1d", "stochastic_depth_drop_rate": 0.0}
    read = {"dtype": "float32"}
    task = {
        "model": {"backbone": {"movinet": movinet}},
        "train_data": {**read, **_READ_AS_FOR_EVALUATION},
        "validation_data": read,
    }
    experiment = vision_experiments._video(task)
    return dataclasses.replace(
        experiment, make_data=lambda directory: vision_data.write_videos(directory, num_train=16)
    )


def _with_representation(size):
    return merged(_MAXVIT, {"maxvit": {"representation_size": size}})


PROJECTS: dict[str, Experiment] = {
    "resnet_imagenet_qat": _plain_images(
        vision_experiments._classification({"resnet": {"model_id": 50, "depth_multiplier": 0.25}})
    ),
    "mobilenet_imagenet_qat": _plain_images(vision_experiments._classification(_MOBILENET)),
    "retinanet_mobile_coco_qat": _small(
        vision_experiments._retinanet({"spinenet_mobile": {"model_id": "49XS", "min_level": 3, "max_level": 4}}, (3, 4), 64),
        {"train_data": {"dtype": "float32", "parser": _PLAIN_SCALES}, "validation_data": {"dtype": "float32"}},
    ),
    "mnv2_deeplabv3_pascal_qat": _small(
        vision_experiments._deeplab(_MOBILENET, **vision_experiments._PASCAL),
        {"train_data": _PLAIN_SCALES, "allow_image_summary": False},
    ),
    "bert/squad_qat": _small(_of_text("bert/squad_qat")),
    "yolo_darknet": _small(
        _yolo_detector({"darknet": {"model_id": "cspdarknettiny", "min_level": 4, "max_level": 5, "width_scale": 0.25}})
    ),
    "scaled_yolo": _small(_yolo_detector({"darknet": {"model_id": "altered_cspdarknet53", "width_scale": 0.25, "depth_scale": 0.3}})),
    "coco_yolov7_pico": _small(_yolo_detector({"yolov7": {}})),
    "darknet_classification": _plain_images(
        vision_experiments._classification({"darknet": {"model_id": "cspdarknettiny", "width_scale": 0.25}}),
        _READ_AS_FOR_EVALUATION,
    ),
    "detr_coco_tfrecord": _small(_transformer_detector(), {"train_data": _READ_AS_FOR_EVALUATION}),
    "seg_unet3d_test": _small(_volumes()),
    "maxvit_imagenet": _plain_images(
        vision_experiments._classification(_with_representation(8)), losses={"soft_labels": False}
    ),
    "retinanet_maxvit_coco": _small(
        vision_experiments._retinanet(_MAXVIT, (3, 4), 64),
        {"train_data": {"dtype": "float32", "parser": _PLAIN_SCALES}, "validation_data": {"dtype": "float32"}},
    ),
    "movinet_kinetics600": _small(_moving(), optimizer=_RATES_ABOVE_ZERO),
    "bigbird/glue": _small(_of_text("bigbird/glue", _bigbird_model)),
    "bigbird/squad": _small(_of_text("bigbird/squad", _bigbird_model)),
    "bert/sentence_prediction, MobileBERT": _small(
        _encoded(
            "mobilebert", word_vocab_size=None, word_embed_size=8, max_sequence_length=32, num_blocks=1,
            hidden_size=16, num_attention_heads=2, intermediate_size=32, intra_bottleneck_size=8,
        )
    ),
    "bert/sentence_prediction, ALBERT": _small(
        _encoded("albert", **{**text_experiments._BERT, "vocab_size": None, "embedding_width": 8})
    ),
    "bert/sentence_prediction, XLNet": _small(
        _encoded(
            "xlnet", vocab_size=None, num_layers=1, hidden_size=16, num_attention_heads=2, head_size=8,
            inner_size=32, embedding_width=16,
        )
    ),
    "dual encoder": _small(_dual_encoder()),
}  # fmt: skip

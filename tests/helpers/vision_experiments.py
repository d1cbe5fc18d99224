"""Each vision experiment that Model Garden registers, small enough to train in seconds on two cores.

An experiment keeps what makes it itself: its task, its kind of backbone, decoder and head, its optimizer and schedule, its
augmentation and its precision. Sizes shrink, and schedules end with the few steps that are run. Weights are drawn anew
where the experiment would load trained ones. The four experiments without a model get a complete one.
"""

import vision_data
from experiment import Experiment, merged

_STEPS = 3


# Of each kind of schedule; an experiment has chosen one. The published ones would still warm up when the run ends.
_SCHEDULES = {
    "learning_rate": {
        "stepwise": {"boundaries": [2], "values": [0.01, 0.001]},
        "cosine": {"initial_learning_rate": 0.01, "decay_steps": _STEPS},
        "polynomial": {"initial_learning_rate": 0.01, "decay_steps": _STEPS},
        "exponential": {"initial_learning_rate": 0.01, "decay_steps": 2},
    },
    "warmup": {"linear": {"warmup_steps": 1, "warmup_learning_rate": 0.001}},
}
# For an experiment that has none of its own.
_OPTIMIZER = {
    "optimizer": {"type": "adam", "adam": {}},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.001}},
}


# Batches and maps are tiny, so that moments differ much from batch to batch, and by layers of them evaluation overflows:
# averages that follow within the few steps, and an epsilon that keeps small variances from scaling up.
_NORM = {"norm_momentum": 0.3, "norm_epsilon": 0.1}
# Some experiments shrink an image to a tenth, which leaves nothing of a small one.
_SCALES = {"aug_scale_min": 0.8, "aug_scale_max": 1.25}


def _run(paths, task, batch_size, train_data, validation_data, optimizer):
    """Returns the overrides that all experiments share, and those of a task's model and data."""
    read = {"global_batch_size": batch_size, "seed": 0, "deterministic": True, "shuffle_buffer_size": 8}
    return {
        "task": merged(
            {
                "init_checkpoint": None,
                "train_data": {**read, **train_data, "input_path": paths["train"], "is_training": True},
                # All examples, the last batch a partial one.
                "validation_data": {
                    **read,
                    **validation_data,
                    "input_path": paths["validation"],
                    "is_training": False,
                    "drop_remainder": False,
                },
            },
            task,
        ),
        "trainer": {
            "train_steps": _STEPS,
            "steps_per_loop": _STEPS,
            "summary_interval": _STEPS,
            "checkpoint_interval": _STEPS,
            "validation_interval": _STEPS,
            "validation_steps": -1,
            "optimizer_config": merged(_SCHEDULES, optimizer),
        },
        "runtime": {"distribution_strategy": "one_device"},
    }


def _classification(backbone, task=None, optimizer=None):
    """Image classification; `backbone` overrides that of the experiment."""
    model = {"num_classes": vision_data.NUM_DIGITS, "input_size": [32, 32, 3], "backbone": backbone}

    def overrides(paths):
        return _run(paths, merged({"model": model}, task or {}), 4, {}, {}, optimizer or {})

    return Experiment(vision_data.write_images, overrides)


def _detector(backbone, levels, size):
    """Settings that the models of all detectors have."""
    return {
        "num_classes": vision_data.NUM_SCENE_CLASSES,
        "input_size": [size, size, 3],
        "min_level": levels[0],
        "max_level": levels[1],
        "backbone": backbone,
        "norm_activation": _NORM,
        "anchor": {"anchor_size": 16 / 2 ** levels[0]},
        "decoder": {"fpn": {"num_filters": 16}},
        # The scores of a model that has hardly learnt are low; a published threshold would leave no box to compare.
        "detection_generator": {"pre_nms_top_k": 50, "pre_nms_score_threshold": 0.0, "max_num_detections": 20},
    }


def _retinanet(backbone, levels, size, task=None, optimizer=None):
    model = {
        **_detector(backbone, levels, size),
        "head": {"num_convs": 1, "num_filters": 16},
    }

    def overrides(paths):
        ours = {"annotation_file": paths["annotations"], "model": model}
        return _run(paths, merged(ours, task or {}), 2, {"parser": _SCALES}, {}, optimizer or {})

    return Experiment(vision_data.write_scenes, overrides)


def _rcnn(backbone, levels, size, masks=True):
    """Faster, Mask and Cascade R-CNN."""
    proposals = {"pre_nms_top_k": 50, "num_proposals": 32, "test_pre_nms_top_k": 50, "test_num_proposals": 32}
    model = {
        **_detector(backbone, levels, size),
        "rpn_head": {"num_filters": 16},
        "detection_head": {"num_convs": 1, "num_filters": 16, "fc_dims": 16},
        "roi_generator": proposals,
        "roi_sampler": {"num_sampled_rois": 16},
    }
    if masks:
        model |= {"mask_head": {"num_convs": 1, "num_filters": 16}, "mask_sampler": {"num_sampled_masks": 8}}
    parser = {"max_num_instances": 4, "rpn_batch_size_per_im": 32, "mask_crop_size": 28}

    def overrides(paths):
        ours = {"annotation_file": paths["annotations"], "model": model}
        return _run(paths, ours, 2, {"parser": parser | _SCALES}, {"parser": parser}, {})

    return Experiment(vision_data.write_scenes, overrides)


def _segmentation(model, train_data=None, validation_data=None, task=None, optimizer=None):
    ours = {
        "num_classes": vision_data.NUM_SCENE_CLASSES,
        "norm_activation": _NORM,
        "head": {"num_filters": 16, "low_level_num_filters": 8},
    }
    size = {"output_size": [64, 64]}
    train = {**size, **_SCALES, **(train_data or {})}

    def overrides(paths):
        # Without weights the model says background everywhere, and the metrics would not tell one model from another.
        losses = {"class_weights": [0.1] + [1.0] * (vision_data.NUM_SCENE_CLASSES - 1)}
        whole = merged({"model": ours, "losses": losses}, {"model": model}, task or {})
        return _run(paths, whole, 2, train, size | (validation_data or {}), optimizer or {})

    return Experiment(vision_data.write_scenes, overrides)


def _deeplab(backbone, decoder=None, **data):
    aspp = {"num_filters": 16, **(decoder or {})}
    return _segmentation({"backbone": backbone, "decoder": {"aspp": aspp}}, **data)


# What other models learn with, makes this one's weights grow without bound.
_SLOW = {
    "learning_rate": {"cosine": {"initial_learning_rate": 0.0001}},
    "warmup": {"linear": {"warmup_learning_rate": 0}},
}


def _video(task=None, optimizer=None):
    # An empty name of tensorflow_datasets: UCF-101 names one, which would be downloaded, and takes files as well.
    read = {
        "tfds_name": "",
        "num_classes": vision_data.NUM_DIGITS,
        "feature_shape": [4, 64, 64, 3],
        "temporal_stride": 1,
        "min_image_size": 64,
    }

    def overrides(paths):
        train, validation = {"num_examples": paths["num_train"]}, {"num_examples": paths["num_validation"]}
        ours = {"model": {"norm_activation": _NORM}}
        return _run(paths, merged(ours, task or {}), 4, read | train, read | validation, optimizer or _SLOW)

    return Experiment(vision_data.write_videos, overrides)


_RESNET = {"resnet": {"model_id": 10, "depth_multiplier": 0.25}}
_MOBILENET = {"mobilenet": {"filter_size_scale": 0.25}}
_SPINENET = {"spinenet": {"model_id": "49S", "min_level": 3, "max_level": 4}}
_SPINENET_MOBILE = {"spinenet_mobile": {"model_id": "49XS", "min_level": 3, "max_level": 4}}
_VIT = {"vit": {"model_name": "vit-ti16", "representation_size": 16}}
_DILATED_RESNET = {"dilated_resnet": {"model_id": 50}}

_PASCAL = {"validation_data": {"groundtruth_padded_size": [64, 64]}}
_CITYSCAPES = {
    "train_data": {"output_size": [64, 64], "crop_size": [32, 32]},
    # In pixels of the image: those of a crop.
    "decoder": {"pool_kernel_size": [32, 32]},
}

VISION: dict[str, Experiment] = {
    "image_classification": _classification(
        {"type": "resnet", **_RESNET},
        task={"losses": {"one_hot": False}},
        optimizer=_OPTIMIZER,
    ),
    "resnet_imagenet": _classification(_RESNET),
    "resnet_rs_imagenet": _classification(_RESNET),
    "revnet_imagenet": _classification({"revnet": {"model_id": 38}}),
    "mobilenet_imagenet": _classification(_MOBILENET),
    "deit_imagenet_pretrain": _classification(_VIT),
    "vit_imagenet_pretrain": _classification(_VIT),
    "vit_imagenet_finetune": _classification(_VIT),
    "retinanet": _retinanet(
        {"type": "resnet", **_RESNET},
        (3, 4),
        64,
        task={"train_data": {"dtype": "float32"}, "validation_data": {"dtype": "float32"}},
        optimizer=_OPTIMIZER,
    ),
    "retinanet_resnetfpn_coco": _retinanet(_RESNET, (3, 4), 64),
    "retinanet_spinenet_coco": _retinanet(_SPINENET, (3, 4), 64),
    "retinanet_mobile_coco": _retinanet(_SPINENET_MOBILE, (3, 4), 64),
    "fasterrcnn_resnetfpn_coco": _rcnn(_RESNET, (2, 3), 64, masks=False),
    "maskrcnn_resnetfpn_coco": _rcnn(_RESNET, (2, 3), 64),
    "maskrcnn_spinenet_coco": _rcnn(_SPINENET, (3, 4), 64),
    "maskrcnn_mobilenet_coco": _rcnn(_MOBILENET, (3, 4), 64),
    "cascadercnn_spinenet_coco": _rcnn(_SPINENET, (3, 4), 64),
    "semantic_segmentation": _segmentation(
        {
            "input_size": [64, 64, 3],
            "min_level": 3,
            "max_level": 5,
            "backbone": {"type": "resnet", **_RESNET},
            "decoder": {"type": "fpn", "fpn": {"num_filters": 16}},
            "head": {"level": 3, "num_convs": 1},
        },
        optimizer=_OPTIMIZER,
    ),
    "seg_resnetfpn_pascal": _segmentation(
        {
            "input_size": [64, 64, 3],
            "max_level": 5,
            "backbone": _RESNET,
            "decoder": {"fpn": {"num_filters": 16}},
            "head": {"num_convs": 1},
        },
        **_PASCAL,
    ),
    "seg_deeplabv3_pascal": _deeplab(_DILATED_RESNET, **_PASCAL),
    "seg_deeplabv3plus_pascal": _deeplab(_DILATED_RESNET, **_PASCAL),
    "seg_deeplabv3plus_cityscapes": _deeplab(_DILATED_RESNET, **_CITYSCAPES),
    "mnv2_deeplabv3_pascal": _deeplab(_MOBILENET, **_PASCAL),
    "mnv2_deeplabv3_cityscapes": _deeplab(_MOBILENET, **_CITYSCAPES),
    "mnv2_deeplabv3plus_cityscapes": _deeplab(_MOBILENET, **_CITYSCAPES),
    "video_classification": _video(optimizer=_OPTIMIZER),
    "video_classification_kinetics400": _video(),
    "video_classification_kinetics600": _video(),
    "video_classification_kinetics700": _video(),
    "video_classification_kinetics700_2020": _video(),
    "video_classification_ucf101": _video(),
}
